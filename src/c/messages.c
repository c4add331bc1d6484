/*
 * What libibverbs calls in place of fprintf: compiled with it, which has this name by a definition. That a driver of the kernel
 * has another interface than its provider knows goes to src/base/device_access.rs, and from there into errors. That the kernel's own
 * interface is another one is said by the errors of src/verbs/device/list.rs, also where librdmacm asks for devices. The rest is
 * printed.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* No shared library exports what Rust defines for this one: a hidden reference hides it. */
__attribute__((visibility("hidden")))
void ibverbs_bundled_driver_abi(const char *device, unsigned int found, unsigned int low, unsigned int high);
int ibverbs_bundled_message(FILE *file, const char *format, ...);

int ibverbs_bundled_message(FILE *file, const char *format, ...)
{
	va_list arguments;
	int printed = 0;

	va_start(arguments, format);
	if (strstr(format, "does not support the kernel ABI of %u (supports %u to %u) for device %s")) {
		unsigned int found, low, high;

		(void)va_arg(arguments, const char *); /* the provider */
		found = va_arg(arguments, unsigned int);
		low = va_arg(arguments, unsigned int);
		high = va_arg(arguments, unsigned int);
		ibverbs_bundled_driver_abi(va_arg(arguments, const char *), found, low, high);
	} else if (!strstr(format, "Fatal: kernel ABI version %d doesn't match library version %d")) {
		printed = vfprintf(file, format, arguments);
	}
	va_end(arguments);
	return printed;
}
