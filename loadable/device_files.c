/*
 * For LD_PRELOAD: programs see a character device /dev/infiniband/NAME for each device of software, which needs none itself.
 * UCX uses no device without one. What is asked about such a file is answered for /dev/null. And they see
 * /sys/class/infiniband with a folder for each, as the kernel has it: Mooncake looks there. It is the folder that the
 * variable IBVERBS_SOFTWARE_SYSFS names, which "run" makes.
 *
 * A part of libibverbs it cannot be: libraries that are loaded later find these functions in the C library, which precedes
 * libibverbs unless that is preloaded.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/*
 * Beside "infiniband" is "infiniband_mad", whose one file tells libibumad that the kernel has its interface.
 * Each call uses its answer before this thread's next one.
 */
static const char *in_class(const char *path)
{
	static const char folder[] = "/sys/class/infiniband", mad[] = "_mad";
	static __thread char other[PATH_MAX];
	const char *made = getenv("IBVERBS_SOFTWARE_SYSFS"), *rest, *below;
	int length;

	if (!path || !made || !*made || strncmp(path, folder, sizeof(folder) - 1))
		return path;
	rest = below = path + sizeof(folder) - 1;
	if (!strncmp(rest, mad, sizeof(mad) - 1))
		below += sizeof(mad) - 1;
	if (*below && *below != '/')
		return path;
	length = snprintf(other, sizeof(other), "%s%s", made, rest);
	return length > 0 && (size_t)length < sizeof(other) ? other : path;
}

static const char *redirect(const char *path)
{
	static const char folder[] = "/dev/infiniband/";
	const char *devices = getenv("IBVERBS_SOFTWARE"), *name;
	size_t length;

	path = in_class(path);
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
REDIRECTED(int, lstat, (const char *path, struct stat *to), redirect(path), to)
REDIRECTED(int, lstat64, (const char *path, struct stat64 *to), redirect(path), to)
REDIRECTED(DIR *, opendir, (const char *path), in_class(path))
REDIRECTED(int, scandir, (const char *path, struct dirent ***to, int (*is_wanted)(const struct dirent *),
			  int (*compare)(const struct dirent **, const struct dirent **)), in_class(path), to, is_wanted, compare)
REDIRECTED(int, scandir64, (const char *path, struct dirent64 ***to, int (*is_wanted)(const struct dirent64 *),
			    int (*compare)(const struct dirent64 **, const struct dirent64 **)), in_class(path), to, is_wanted, compare)
REDIRECTED(FILE *, fopen, (const char *path, const char *mode), in_class(path), mode)
REDIRECTED(FILE *, fopen64, (const char *path, const char *mode), in_class(path), mode)
REDIRECTED(ssize_t, readlink, (const char *path, char *to, size_t size), in_class(path), to, size)
REDIRECTED(char *, realpath, (const char *path, char *to), in_class(path), to)

/* Whether a call with these flags has a mode behind them. */
#define HAS_MODE(flags) ((flags) & O_CREAT || ((flags) & O_TMPFILE) == O_TMPFILE)

#define REDIRECTED_OPEN(function, parameters, last, ...)				\
	int function parameters								\
	{										\
		static int (*real) parameters;						\
		mode_t mode = 0;							\
		va_list more;								\
											\
		if (!real)								\
			real = (int (*) parameters)dlsym(RTLD_NEXT, #function);		\
		if (HAS_MODE(last)) {							\
			va_start(more, last);						\
			mode = va_arg(more, mode_t);					\
			va_end(more);							\
		}									\
		return real(__VA_ARGS__, mode);						\
	}

REDIRECTED_OPEN(open, (const char *path, int flags, ...), flags, in_class(path), flags)
REDIRECTED_OPEN(open64, (const char *path, int flags, ...), flags, in_class(path), flags)
REDIRECTED_OPEN(openat, (int folder, const char *path, int flags, ...), flags, folder, in_class(path), flags)
REDIRECTED_OPEN(openat64, (int folder, const char *path, int flags, ...), flags, folder, in_class(path), flags)
