/*
 * Devices of software inside a shared libibverbs: compiled with rdma-core's libibverbs, and linked with "--wrap" for the
 * three functions of that library by which devices of the kernel are found, opened and asked.
 *
 * A device of software gets a "struct verbs_sysfs_dev" like any other, without a folder in sysfs behind it. Its number
 * as a character device, which no file has, tells it from the kernel's.
 */
#define _GNU_SOURCE
#include <config.h>

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <infiniband/driver.h>

#include "ibverbs.h"

/* lib.rs */
int ibverbs_loadable_devices(struct ibv_device *const **list);
uint64_t ibverbs_loadable_guid(struct ibv_device *device);

/* The functions that are wrapped, and what takes their places. */
int __real_ibverbs_get_device_list(struct list_head *list);
int __wrap_ibverbs_get_device_list(struct list_head *list);
int __real_open_cdev(const char *name, dev_t cdev);
int __wrap_open_cdev(const char *name, dev_t cdev);
int __wrap_ibv_read_ibdev_sysfs_file(char *buffer, size_t size, struct verbs_sysfs_dev *dev, const char *format, ...);


#define SOFTWARE makedev(0, 1)

/* Returns a negative errno value if there is no memory. */
static int give_sysfs(struct verbs_device *device)
{
	struct verbs_sysfs_dev *sysfs;

	if (device->sysfs)
		return 0;
	sysfs = calloc(1, sizeof(*sysfs));
	if (!sysfs)
		return -ENOMEM;
	sysfs->flags = VSYSFS_READ_NODE_GUID;
	sysfs->node_guid = ibverbs_loadable_guid(&device->device);
	sysfs->sysfs_cdev = SOFTWARE;
	sysfs->ibdev_idx = -1;
	snprintf(sysfs->sysfs_name, sizeof(sysfs->sysfs_name), "%s", device->device.dev_name);
	snprintf(sysfs->ibdev_name, sizeof(sysfs->ibdev_name), "%s", device->device.name);
	snprintf(sysfs->ibdev_path, sizeof(sysfs->ibdev_path), "%s", device->device.ibdev_path);
	/* ibverbs_device_put() frees it. */
	device->sysfs = sysfs;
	return 0;
}

static void take_out(struct list_head *list)
{
	struct verbs_device *device, *next;

	list_for_each_safe(list, device, next, entry) {
		if (device->sysfs->sysfs_cdev != SOFTWARE)
			continue;
		list_del(&device->entry);
		ibverbs_device_put(&device->device);
	}
}

/*
 * libibverbs calls it with its lock held. The devices of software come first. If there are any, a machine without RDMA
 * in its kernel is no error.
 */
int __wrap_ibverbs_get_device_list(struct list_head *list)
{
	struct ibv_device *const *first, *const *device;
	int count, ret;

	/* The function itself would take them for devices of the kernel that are gone. */
	take_out(list);
	count = __real_ibverbs_get_device_list(list);
	ret = ibverbs_loadable_devices(&first);
	if (ret)
		return -ret;
	if (!*first)
		return count;
	if (count < 0)
		count = 0;
	for (device = first; *device; device++) {
		ret = give_sysfs(verbs_get_device(*device));
		if (ret)
			return ret;
	}
	while (device-- != first) {
		ibverbs_device_hold(*device);
		list_add(list, &verbs_get_device(*device)->entry);
		count++;
	}
	return count;
}

/* A file by which requests to the kernel are recognised. The device's context owns it. */
int __wrap_open_cdev(const char *name, dev_t cdev)
{
	return cdev == SOFTWARE ? eventfd(0, EFD_CLOEXEC) : __real_open_cdev(name, cdev);
}

/* Compiled with the name of rdma-core's function changed: see hook.cmake. */
#undef ibv_import_device
struct ibv_context *ibv_import_device(int cmd_fd);
struct ibv_context *ibv_import_device(int cmd_fd)
{
	static const char ours[] = "anon_inode:[eventfd]";
	char link[32], file[sizeof(ours)];

	/* The objects of a device of software are this process's: no other can share them by a file. */
	snprintf(link, sizeof(link), "/proc/self/fd/%d", cmd_fd);
	if (readlink(link, file, sizeof(file)) == sizeof(ours) - 1 && !memcmp(file, ours, sizeof(ours) - 1)) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	return ibverbs_stock_import_device(cmd_fd);
}

/* Only the table of P_Keys is read where a device answers no other way. */
int __wrap_ibv_read_ibdev_sysfs_file(char *buffer, size_t size, struct verbs_sysfs_dev *dev, const char *format, ...)
{
	unsigned int port, index;
	char file[256];
	va_list arguments;
	int length;

	va_start(arguments, format);
	length = vsnprintf(file, sizeof(file), format, arguments);
	va_end(arguments);
	if (!dev || length < 0 || (size_t)length >= sizeof(file)) {
		errno = EINVAL;
		return -1;
	}
	if (dev->sysfs_cdev != SOFTWARE)
		return ibv_read_sysfs_file(dev->ibdev_path, file, buffer, size);
	if (sscanf(file, "ports/%u/pkeys/%u", &port, &index) == 2 && port >= 1 && index == 0)
		return snprintf(buffer, size, "0xffff");
	errno = ENOENT;
	return -1;
}

#ifdef OLD_PRIVATE
/*
 * ibv_devinfo of distributions whose rdma-core has another private interface needs these of it, which have not changed.
 * What needs more, librdmacm and the providers, is of the same version as this library.
 */
int ibverbs_loadable_query_gid_type(struct ibv_context *context, uint8_t port, unsigned int index,
				    enum ibv_gid_type_sysfs *type);
__asm__(".symver ibverbs_loadable_query_gid_type, ibv_query_gid_type@" OLD_PRIVATE);
int ibverbs_loadable_query_gid_type(struct ibv_context *context, uint8_t port, unsigned int index,
				    enum ibv_gid_type_sysfs *type)
{
	return ibv_query_gid_type(context, port, index, type);
}

int ibverbs_loadable_read_sysfs_file(const char *dir, const char *file, char *buffer, size_t size);
__asm__(".symver ibverbs_loadable_read_sysfs_file, ibv_read_sysfs_file@" OLD_PRIVATE);
int ibverbs_loadable_read_sysfs_file(const char *dir, const char *file, char *buffer, size_t size)
{
	return ibv_read_sysfs_file(dir, file, buffer, size);
}
#endif
