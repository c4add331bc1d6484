//! Memory windows: binding and invalidating.

use super::core::Core;
use super::memory::{Bound, Denied, Key};
use super::work::Bind;
use crate::ffi::ibv_access_flags as Access;

const REMOTE: u32 = Access::IBV_ACCESS_REMOTE_WRITE.0
    | Access::IBV_ACCESS_REMOTE_READ.0
    | Access::IBV_ACCESS_REMOTE_ATOMIC.0;
const CHANGES: u32 = Access::IBV_ACCESS_REMOTE_WRITE.0 | Access::IBV_ACCESS_REMOTE_ATOMIC.0;

impl Core {
    /// Binds a window to a part of a region, or to nothing if the length is 0.
    pub(crate) fn bind_window(&mut self, pd: u32, qpn: u32, bind: Bind) -> Result<(), Denied> {
        let Some(Key::Window(window)) = self.keys.0.get(bind.window) else { return Err(Denied) };
        let (type_2, before) = (window.type_2, window.bound);
        // A window of type 2 that is bound must be invalidated first.
        if window.pd != pd || (type_2 && before.is_some()) || bind.rkey >> 8 != window.rkey >> 8 {
            return Err(Denied);
        }
        let bound = if bind.length == 0 {
            None
        } else {
            let region = self.keys.region(bind.region).ok_or(Denied)?;
            let offset = bind.address.checked_sub(region.iova).ok_or(Denied)?;
            let inside = offset <= region.length && bind.length <= region.length - offset;
            let local_write = Access::IBV_ACCESS_LOCAL_WRITE.0;
            let allowed = region.access & Access::IBV_ACCESS_MW_BIND.0 != 0
                && bind.access & !(REMOTE | local_write) == 0
                && (bind.access & CHANGES == 0 || region.access & local_write != 0);
            if region.pd != pd || !inside || !allowed {
                return Err(Denied);
            }
            let Bind { region, address, length, access, .. } = bind;
            Some(Bound { region, address, length, access, qpn })
        };
        self.unbind(before);
        if let Some(region) = bound.and_then(|bound| self.keys.region_mut(bound.region)) {
            region.windows += 1;
        }
        if let Some(Key::Window(window)) = self.keys.0.get_mut(bind.window) {
            window.bound = bound;
            window.rkey = bind.rkey;
        }
        Ok(())
    }

    /// Invalidates a window of type 2, through the queue pair that it is bound to.
    pub(crate) fn invalidate_window(
        &mut self,
        (pd, qpn): (u32, u32),
        rkey: u32,
    ) -> Result<(), Denied> {
        let window = self.keys.window_mut(rkey).ok_or(Denied)?;
        let through = window.bound.is_none_or(|bound| bound.qpn == qpn);
        if window.pd != pd || !window.type_2 || !through {
            return Err(Denied);
        }
        let bound = window.bound.take();
        self.unbind(bound);
        Ok(())
    }

    fn unbind(&mut self, bound: Option<Bound>) {
        if let Some(region) = bound.and_then(|bound| self.keys.region_mut(bound.region)) {
            region.windows = region.windows.saturating_sub(1);
        }
    }

    /// Removes a window, bound or not.
    pub(crate) fn remove_window(&mut self, number: u32) -> Option<()> {
        // Its number in the table: the low bits of its current key may differ.
        match self.keys.0.remove(number)? {
            Key::Window(window) => {
                self.unbind(window.bound);
                self.leave_pd(window.pd);
                Some(())
            }
            Key::Region(_) => None,
        }
    }

    /// Invalidates the windows of type 2 that were bound through a queue pair.
    pub(crate) fn unbind_all_of(&mut self, qpn: u32) {
        let numbers: Vec<u32> = self
            .keys
            .0
            .iter()
            .filter_map(|(number, key)| match key {
                Key::Window(w) if w.type_2 && w.bound.is_some_and(|b| b.qpn == qpn) => Some(number),
                _ => None,
            })
            .collect();
        for number in numbers {
            if let Some(Key::Window(window)) = self.keys.0.get_mut(number) {
                let bound = window.bound.take();
                self.unbind(bound);
            }
        }
    }
}
