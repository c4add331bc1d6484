/*
 * For LD_PRELOAD: programs see a character device /dev/infiniband/NAME for each device of software, which needs none itself.
 * UCX uses no device without one. What is asked about such a file is answered for /dev/null.
 *
 * A part of libibverbs it cannot be: libraries that are loaded later find these functions in the C library, which precedes
 * libibverbs unless that is preloaded.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *redirect(const char *path)
{
	static const char folder[] = "/dev/infiniband/";
	const char *devices = getenv("IBVERBS_SOFTWARE"), *name;
	size_t length;

	if (!path || !devices || strncmp(path, folder, sizeof(folder) - 1))
		return path;
	name = path + sizeof(folder) - 1;
	length = strlen(name);
	while (length && *devices) {
		size_t other = strcspn(devices, "=,");

		if (other == length && !memcmp(devices, name, length))
			return "/dev/null";
		devices += strcspn(devices, ",");
		devices += *devices == ',';
	}
	return path;
}

#define REDIRECTED(result, function, parameters, ...)					\
	result function parameters							\
	{										\
		static result (*real) parameters;					\
											\
		if (!real)								\
			real = (result (*) parameters)dlsym(RTLD_NEXT, #function);	\
		return real(__VA_ARGS__);						\
	}

/* Programs that were linked with a C library before 2.33 call the functions with an x. */
REDIRECTED(int, stat, (const char *path, struct stat *to), redirect(path), to)
REDIRECTED(int, stat64, (const char *path, struct stat64 *to), redirect(path), to)
REDIRECTED(int, __xstat, (int version, const char *path, struct stat *to), version, redirect(path), to)
REDIRECTED(int, __xstat64, (int version, const char *path, struct stat64 *to), version, redirect(path), to)
REDIRECTED(int, statx, (int folder, const char *path, int flags, unsigned int mask, struct statx *to), folder, redirect(path), flags, mask, to)
REDIRECTED(int, access, (const char *path, int mode), redirect(path), mode)
