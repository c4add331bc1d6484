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
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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

/* A memory file has a name of at most 249 bytes. */
#define NAME_ROOM 250

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

/*
 * The name of the file by which requests to the kernel are recognised. Another process has devices of its own, so the name
 * has the process that made it.
 */
static void file_name(char *to, size_t size, const char *device)
{
	snprintf(to, size, "ibverbs-software %d %s", getpid(), device);
}

/* The device's context owns the file. */
int __wrap_open_cdev(const char *name, dev_t cdev)
{
	char file[NAME_ROOM];

	if (cdev != SOFTWARE)
		return __real_open_cdev(name, cdev);
	file_name(file, sizeof(file), name);
	return memfd_create(file, MFD_CLOEXEC);
}

/* Whether a link of /proc names the file of this device. */
static bool is_file_of(const char *link, struct verbs_device *device)
{
	char file[NAME_ROOM], whole[NAME_ROOM + 32];

	if (device->sysfs->sysfs_cdev != SOFTWARE)
		return false;
	file_name(file, sizeof(file), device->sysfs->sysfs_name);
	snprintf(whole, sizeof(whole), "/memfd:%s (deleted)", file);
	return !strcmp(link, whole);
}

/* Compiled with the name of rdma-core's function changed: see hook.cmake. */
#undef ibv_import_device
struct ibv_context *ibv_import_device(int cmd_fd);
struct ibv_context *ibv_import_device(int cmd_fd)
{
	char path[32], link[NAME_ROOM + 32];
	struct ibv_context *context = NULL;
	struct ibv_device **list, **device;
	ssize_t length;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", cmd_fd);
	length = readlink(path, link, sizeof(link) - 1);
	if (length < 0)
		return ibverbs_stock_import_device(cmd_fd);
	link[length] = 0;
	list = ibv_get_device_list(NULL);
	for (device = list; device && *device; device++)
		if (is_file_of(link, verbs_get_device(*device)))
			break;
	if (!device || !*device) {
		if (list)
			ibv_free_device_list(list);
		return ibverbs_stock_import_device(cmd_fd);
	}
	/* A context has a file of its own. The one that was given becomes libibverbs' if this succeeds. */
	context = verbs_open_device(*device, NULL);
	ibv_free_device_list(list);
	if (context)
		close(cmd_fd);
	return context;
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
