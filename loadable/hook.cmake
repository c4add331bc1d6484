# CMake reads this right after project() of rdma-core. It leaves out the folders that are not built, and makes the
# devices of software part of the shared libibverbs.
macro(add_subdirectory folder)
  # Half of pyverbs is for mlx5, and rdma-core's tests of the other devices only import it (rdma_core_tests.py).
  if("${folder}" IN_LIST LOADABLE_FOLDERS AND NOT "${CMAKE_CURRENT_SOURCE_DIR}/${folder}" MATCHES "pyverbs/providers/mlx5$")
    if("${folder}" STREQUAL "pyverbs")
      set(CMAKE_C_FLAGS_RELEASE "-O0 -DNDEBUG") # for tests only, and much C
    endif()
    _add_subdirectory(${folder})
    if("${folder}" STREQUAL "librdmacm")
      # Of this library alone: librspreload defines functions of these names.
      target_sources(rdmacm PRIVATE "${LOADABLE}/../src/c/manager.c")
      target_compile_definitions(rdmacm PRIVATE open_cdev=ibverbs_manager_open write=ibverbs_manager_write
        close=ibverbs_manager_close)
    endif()
    if("${folder}" STREQUAL "libibverbs")
      set_property(TARGET ibverbs APPEND_STRING PROPERTY LINK_FLAGS " -Wl,--version-script,${LOADABLE}/manager.map")
      target_sources(ibverbs PRIVATE "${LOADABLE}/hooks.c" "${LOADABLE}/plain.c")
      target_include_directories(ibverbs PRIVATE "${PROJECT_SOURCE_DIR}/libibverbs")
      target_compile_definitions(ibverbs PRIVATE ioctl=ibverbs_bundled_ioctl
        ibv_import_device=ibverbs_stock_import_device)
      set_property(TARGET ibverbs APPEND PROPERTY LINK_LIBRARIES "${LOADABLE_ARCHIVE}" gcc_s m)
      set_property(TARGET ibverbs APPEND PROPERTY LINK_DEPENDS "${LOADABLE_ARCHIVE}")
      set_property(TARGET ibverbs APPEND_STRING PROPERTY LINK_FLAGS " -Wl,--gc-sections")
      if(NOT IBVERBS_PABI_VERSION EQUAL 34)
        target_compile_definitions(ibverbs PRIVATE OLD_PRIVATE="IBVERBS_PRIVATE_34")
        set_property(TARGET ibverbs APPEND_STRING PROPERTY LINK_FLAGS " -Wl,--version-script,${LOADABLE}/private_34.map")
      endif()
      foreach(name ibverbs_get_device_list open_cdev ibv_read_ibdev_sysfs_file)
        set_property(TARGET ibverbs APPEND_STRING PROPERTY LINK_FLAGS " -Wl,--wrap=${name}")
      endforeach()
    endif()
  endif()
endmacro()
