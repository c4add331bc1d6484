/* Tells callgrind when to count. Outside of valgrind, nothing happens. */

#include <stdbool.h>
#include <valgrind/callgrind.h>

void overhead_count(bool on)
{
	if (on)
		CALLGRIND_START_INSTRUMENTATION;
	else
		CALLGRIND_STOP_INSTRUMENTATION;
}
