//! The programs of perftest.

/// Whether a program that has failed has done everything but print the bandwidth. It measures the frequency of the
/// processor by the time that passes, and gives up where a busy host disturbs that.
pub(crate) fn lacks_only_the_report(output: &str) -> bool {
    output.contains("Can't produce a report")
}
