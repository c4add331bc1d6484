//! Does what stream.rs does, over a stream of rdma-io: `stream COUNT SIZE back|one [ADDRESS]`.

mod rows;

use rdma_io::async_cm::AsyncCmListener;
use rdma_io::async_stream::AsyncRdmaStream;
use rdma_io::send_recv_transport::{SendRecvConfig, SendRecvTransport};
use rows::{Result, Work, answers_as_task, asks_as_task, runtime};
use tokio_util::compat::FuturesAsyncReadCompatExt;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (work, address) = args.split_at(args.len().min(3));
    let work = Work::parse(work)?;
    runtime()?.block_on(async {
        if let [address] = address {
            let stream =
                SendRecvTransport::connect(&address.parse()?, SendRecvConfig::stream()).await?;
            return asks_as_task(AsyncRdmaStream::new(stream).compat(), work).await;
        }
        let address = format!("127.0.0.1:{}", 20_000 + std::process::id() % 10_000);
        let listener = AsyncCmListener::bind(&address.parse()?)?;
        println!("{address}");
        let stream = SendRecvTransport::accept(&listener, SendRecvConfig::stream()).await?;
        answers_as_task(AsyncRdmaStream::new(stream).compat(), work).await
    })
}
