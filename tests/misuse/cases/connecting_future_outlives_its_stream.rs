use ibverbs::future::PreparedAsyncChannel;
use ibverbs::tcp::AsyncStream;

pub fn case<S: AsyncStream + Send>(prepared: PreparedAsyncChannel, stream: S) -> usize {
    let mut stream = stream;
    let connecting = prepared.connect(&mut stream, b"");
    let size = size_of_val(&connecting); //~ RIGHT
    drop(connecting); //~ RIGHT
    drop(stream);
    size_of_val(&connecting) //~ ERROR
    size //~ RIGHT
}
