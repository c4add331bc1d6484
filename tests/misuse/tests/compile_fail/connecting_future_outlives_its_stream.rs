use ibverbs::future::PreparedAsyncChannel;
use ibverbs::tcp::AsyncStream;

pub fn case<S: AsyncStream + Send>(prepared: PreparedAsyncChannel, stream: S) -> usize {
    let mut stream = stream;
    let connecting = prepared.connect(&mut stream, b"");
    drop(stream);
    size_of_val(&connecting)
}

fn main() {}
