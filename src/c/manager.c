/*
 * What librdmacm calls in place of open_cdev, write and close: compiled with it, which has these names by definitions of its
 * target alone. Devices of software answer its commands by three functions of src/base/hooks.rs; else they are the kernel's.
 */
#undef open_cdev
#undef write
#undef close

#include <sys/types.h>
#include <unistd.h>

#include <util/util.h>

#ifdef IBVERBS_BUNDLED
/* No shared library exports what Rust defines for this one: a hidden reference hides it. */
#pragma GCC visibility push(hidden)
extern int ibverbs_bundled_get_device_list(void), ibverbs_bundled_get_device_guid(void);
extern int ibverbs_bundled_get_device_index(void);
int (*const ibverbs_bundled_devices[])(void) = {
	ibverbs_bundled_get_device_list, ibverbs_bundled_get_device_guid, ibverbs_bundled_get_device_index,
};
#endif

int ibverbs_bundled_manager_open(int *file);
int ibverbs_bundled_manager_write(int file, const void *bytes, size_t size, ssize_t *result);
void ibverbs_bundled_manager_close(int file);

#ifdef IBVERBS_BUNDLED
#pragma GCC visibility pop
#endif

int ibverbs_manager_open(const char *name, dev_t number);
ssize_t ibverbs_manager_write(int file, const void *bytes, size_t size);
int ibverbs_manager_close(int file);

int ibverbs_manager_open(const char *name, dev_t number)
{
	int file;

	return ibverbs_bundled_manager_open(&file) ? file : open_cdev(name, number);
}

ssize_t ibverbs_manager_write(int file, const void *bytes, size_t size)
{
	ssize_t result;

	return ibverbs_bundled_manager_write(file, bytes, size, &result) ? result : write(file, bytes, size);
}

int ibverbs_manager_close(int file)
{
	ibverbs_bundled_manager_close(file);
	return close(file);
}
