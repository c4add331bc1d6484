use ibverbs::memory::RemoteElement;
use ibverbs::field;

#[derive(Clone, Copy, zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable)]
#[repr(C)]
pub struct Entry(u64, u32, u32);

pub fn case(entry: &RemoteElement<Entry>) -> RemoteElement<u64> {
    entry.field(field!(Entry, 1)) //~ ERROR
    entry.field(field!(Entry, 0)) //~ RIGHT
}
