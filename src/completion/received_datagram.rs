//! What a completion says about the sender of a datagram.

use super::extended_completion::ExtendedSuccess;
use super::work_completion::WorkSuccess;
use crate::error::{Error, Result};
use crate::ffi;

/// The completion of a UD receive, for [`AddressVector::reply_to`](crate::AddressVector::reply_to): a [`WorkSuccess`], or an
/// [`ExtendedSuccess`] of a queue that reports the sender. The trait is sealed.
pub trait ReceivedDatagram: sealed::Sender {}

impl ReceivedDatagram for WorkSuccess {}
impl ReceivedDatagram for ExtendedSuccess<'_> {}

mod sealed {
    use super::*;

    pub trait Sender {
        /// The fields that `ibv_init_ah_from_wc` reads. If they were not reported, returns an error of `verb`.
        fn sender(&self, verb: &'static str) -> Result<ffi::ibv_wc>;
    }

    impl Sender for WorkSuccess {
        fn sender(&self, _verb: &'static str) -> Result<ffi::ibv_wc> {
            Ok(*self.as_raw())
        }
    }

    impl Sender for ExtendedSuccess<'_> {
        fn sender(&self, verb: &'static str) -> Result<ffi::ibv_wc> {
            let (Some(lid), Some(sl), Some(dlid_path_bits)) =
                (self.source_lid(), self.service_level(), self.destination_path_bits())
            else {
                let reason = "build the queue with the completion fields SOURCE_LID, SERVICE_LEVEL and \
                              DESTINATION_PATH_BITS";
                return Err(Error::invalid(verb, reason));
            };
            let flags = self.flags();
            // Beyond 16 bits there is no LID of InfiniBand.
            Ok(ffi::ibv_wc {
                wc_flags: flags,
                slid: lid as u16,
                sl,
                dlid_path_bits,
                ..Default::default()
            })
        }
    }
}
