//! Requests that libibverbs sends to the kernel without the provider: completion channels and GIDs.

use std::ffi::{c_int, c_void};
use std::mem::size_of;

use super::context::{OpenContext, files};
use super::query::table_length;
use super::{set_errno, shared};
use crate::driver::Shared;
use crate::event_files;
use crate::faults::Verb;
use crate::ffi::*;
use crate::link::interfaces::interface_of;
use crate::transport::events;

/// A request to the kernel.
struct Request<'a> {
    object: u16,
    method: u16,
    attributes: &'a [ib_uverbs_attr],
}

impl Request<'_> {
    fn attribute(&self, id: u32) -> Option<&ib_uverbs_attr> {
        self.attributes.iter().find(|attribute| u32::from(attribute.attr_id) == id)
    }

    /// An argument that is passed as a number.
    fn value(&self, id: u32) -> Option<u64> {
        // SAFETY: all members of the union are integers of the same size.
        self.attribute(id).map(|attribute| unsafe { attribute.__bindgen_anon_1.data })
    }

    /// Writes as much of `bytes` to the attribute's buffer as fits.
    ///
    /// # Safety
    ///
    /// libibverbs points the attribute to as much writable memory as it says.
    unsafe fn write(&self, id: u32, at: usize, bytes: &[u8]) -> Result<(), c_int> {
        let attribute = self.attribute(id).ok_or(libc::EINVAL)?;
        let address = self.value(id).ok_or(libc::EINVAL)?;
        let size = bytes.len().min(usize::from(attribute.len).saturating_sub(at));
        // SAFETY: the caller vouches for it.
        unsafe {
            let to = (address as *mut u8).add(at);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, size);
        }
        Ok(())
    }
}

/// Answers a request of libibverbs, if it is about one of our contexts.
///
/// # Safety
///
/// As for `ioctl`: the argument is what the request needs.
pub(crate) unsafe fn answer(fd: c_int, _request: u64, argument: *mut c_void) -> Option<c_int> {
    let OpenContext(context) = files().get(&fd).copied()?;
    // SAFETY: the attributes, whose number the header has, follow it; the context is live while a verb
    // on it runs.
    let result = unsafe {
        let header = argument.cast::<ib_uverbs_ioctl_hdr>();
        let attributes = header.add(1).cast::<ib_uverbs_attr>();
        let request = Request {
            object: (*header).object_id,
            method: (*header).method_id,
            attributes: std::slice::from_raw_parts(attributes, (*header).num_attrs.into()),
        };
        dispatch(context, &request)
    };
    Some(match result {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    })
}

/// # Safety
///
/// `context` is null, while it is being made, or live; the request's pointers are as libibverbs has them.
unsafe fn dispatch(context: *mut ibv_context, request: &Request<'_>) -> Result<(), c_int> {
    if u32::from(request.object) != UVERBS_OBJECT_DEVICE {
        return Err(libc::EOPNOTSUPP);
    }
    // SAFETY: the caller vouches for both.
    unsafe {
        if let Some((errno, _)) = verb_of(request).and_then(|verb| {
            let context = context.as_mut()?;
            shared(context).failures().of(verb)
        }) {
            return Err(errno);
        }
        match u32::from(request.method) {
            UVERBS_METHOD_INVOKE_WRITE => match request.value(UVERBS_ATTR_WRITE_CMD) {
                Some(command) if command == u64::from(IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL) => {
                    let fd = events::create().map_err(|e| e.raw_os_error().unwrap_or(libc::EIO))?;
                    if !context.is_null() {
                        event_files::add(fd, shared(context));
                    }
                    request.write(UVERBS_ATTR_CORE_OUT, 0, &fd.to_ne_bytes())
                }
                // libibverbs sends a request that is too short to learn whether requests work at all.
                Some(command) if command == u64::from(IB_USER_VERBS_CMD_QUERY_DEVICE) => {
                    Err(libc::ENOSPC)
                }
                _ => Err(libc::EOPNOTSUPP),
            },
            _ if context.is_null() => Err(libc::EOPNOTSUPP),
            UVERBS_METHOD_QUERY_GID_ENTRY => gid_entry(shared(context), request),
            UVERBS_METHOD_QUERY_GID_TABLE => gid_table(shared(context), request),
            _ => Err(libc::EOPNOTSUPP),
        }
    }
}

/// The verb that a request belongs to, if it is one that can fail.
fn verb_of(request: &Request<'_>) -> Option<Verb> {
    let creates = u64::from(IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL);
    match u32::from(request.method) {
        UVERBS_METHOD_QUERY_GID_ENTRY | UVERBS_METHOD_QUERY_GID_TABLE => Some(Verb::QueryGid),
        UVERBS_METHOD_INVOKE_WRITE => request
            .value(UVERBS_ATTR_WRITE_CMD)
            .filter(|&command| command == creates)
            .map(|_| Verb::CreateCompChannel),
        _ => None,
    }
}

fn entry(shared: &Shared, port: usize, index: usize) -> Result<ibv_gid_entry, c_int> {
    let engine = shared.lock();
    let number = port.checked_sub(1).ok_or(libc::EINVAL)?;
    let gids = engine.core.ports.get(number).ok_or(libc::EINVAL)?.gids();
    let is_simulated = engine.core.settings.is_simulated;
    drop(engine);
    let is_empty = index < table_length(gids.len());
    let none = if is_empty { libc::ENODATA } else { libc::EINVAL };
    let &(gid, address) = gids.get(index).ok_or(none)?;
    Ok(ibv_gid_entry {
        gid: ibv_gid { raw: gid.octets() },
        gid_index: index as u32,
        port_num: port as u32,
        gid_type: ibv_gid_type::IBV_GID_TYPE_ROCE_V2.0,
        ndev_ifindex: if is_simulated { 0 } else { interface_of(address) },
    })
}

fn bytes(entry: &ibv_gid_entry) -> &[u8] {
    // SAFETY: the structure is of integers and has no padding.
    unsafe {
        std::slice::from_raw_parts(std::ptr::from_ref(entry).cast(), size_of::<ibv_gid_entry>())
    }
}

/// # Safety
///
/// As [`dispatch`].
unsafe fn gid_entry(shared: &Shared, request: &Request<'_>) -> Result<(), c_int> {
    let number = |id| request.value(id).and_then(|value| usize::try_from(value).ok());
    let port = number(UVERBS_ATTR_QUERY_GID_ENTRY_PORT).ok_or(libc::EINVAL)?;
    let index = number(UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX).ok_or(libc::EINVAL)?;
    let entry = entry(shared, port, index)?;
    // SAFETY: the caller vouches for it.
    unsafe { request.write(UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY, 0, bytes(&entry)) }
}

/// # Safety
///
/// As [`dispatch`].
unsafe fn gid_table(shared: &Shared, request: &Request<'_>) -> Result<(), c_int> {
    let size = request.value(UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE).ok_or(libc::EINVAL)?;
    let size = usize::try_from(size).ok().filter(|&size| size > 0).ok_or(libc::EINVAL)?;
    let entries = request.attribute(UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES);
    let room = usize::from(entries.ok_or(libc::EINVAL)?.len) / size;
    let ports = shared.lock().core.ports.len();
    let mut count = 0;
    for port in 1..=ports {
        for index in 0.. {
            let Ok(entry) = entry(shared, port, index) else { break };
            if count == room {
                return Err(libc::EINVAL);
            }
            let bytes = bytes(&entry);
            let bytes = &bytes[..size.min(bytes.len())];
            // SAFETY: the caller vouches for it; there is room for another entry.
            unsafe {
                request.write(UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES, count * size, bytes)?;
            }
            count += 1;
        }
    }
    let count = (count as u64).to_ne_bytes();
    // SAFETY: the caller vouches for it.
    unsafe { request.write(UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, 0, &count) }
}
