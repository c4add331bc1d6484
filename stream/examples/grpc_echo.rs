//! An echo with tonic, in both directions at once, over RDMA: `grpc_echo server [ADDRESS]`, `grpc_echo client ADDRESS`, or both in
//! one program.
//!
//! Over TCP it is the same program with two other lines: see the comments. The service is written by hand here, where a program
//! has what tonic-prost-build makes of a `.proto` file.

use std::convert::Infallible;
use std::env;
use std::error::Error;
use std::future::{Ready, ready};
use std::pin::Pin;
use std::task::{Context, Poll};

use ibverbs_stream::Hub;
use ibverbs_stream::hyper::Connector;
use ibverbs_stream::tokio::Listener;
use ibverbs_stream::tonic::{Incoming, RdmaConnectInfo};
use tonic::body::Body;
use tonic::server::{NamedService, StreamingService};
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[derive(Clone, PartialEq, prost::Message)]
struct Text {
    #[prost(string, tag = "1")]
    text: String,
}

type Codec = ProstCodec<Text, Text>;

/// Answers each message with itself, while others come.
#[derive(Clone)]
struct Echo;

impl NamedService for Echo {
    const NAME: &'static str = "echo.Echo";
}

impl StreamingService<Text> for Echo {
    type Response = Text;
    type ResponseStream = Streaming<Text>;
    type Future = Ready<std::result::Result<Response<Streaming<Text>>, Status>>;

    fn call(&mut self, request: Request<Streaming<Text>>) -> Self::Future {
        let peer = request.extensions().get::<RdmaConnectInfo>().and_then(|info| info.remote_addr);
        println!("a stream of {peer:?}");
        ready(Ok(Response::new(request.into_inner())))
    }
}

impl tower_service::Service<http::Request<Body>> for Echo {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future =
        Pin<Box<dyn Future<Output = std::result::Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<std::result::Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async {
            Ok(tonic::server::Grpc::new(Codec::default()).streaming(Echo, request).await)
        })
    }
}

async fn serve(listener: Listener) -> Result<()> {
    println!("{}", listener.local_addr()?);
    // Over TCP this would be: tonic::transport::server::TcpIncoming::from(listener)
    let incoming = Incoming::from(listener);
    Ok(Server::builder().add_service(Echo).serve_with_incoming(incoming).await?)
}

async fn ask(hub: &Hub, address: &str, count: usize) -> Result<()> {
    let endpoint = Endpoint::try_from(format!("http://{address}"))?;
    // Over TCP this would be: endpoint.connect().await?
    let channel = endpoint.connect_with_connector(Connector::new(hub)).await?;
    let mut grpc = tonic::client::Grpc::new(channel);
    grpc.ready().await?;
    let texts = (0..count).map(|n| Text { text: format!("{n} {}", "x".repeat(n * 37 % 5000)) });
    let request = Request::new(tokio_stream::iter(texts));
    let path = http::uri::PathAndQuery::from_static("/echo.Echo/Chat");
    let mut answers = grpc.streaming(request, path, Codec::default()).await?.into_inner();
    let mut next = 0;
    while let Some(answer) = answers.message().await? {
        assert!(answer.text.starts_with(&format!("{next} ")), "another answer");
        next += 1;
    }
    assert_eq!(next, count);
    println!("{count} answers over RDMA");
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    // Where there is no RDMA device, one of software.
    let _software = ibverbs_software::register_if_none()?;
    let hub = Hub::open(None)?;
    let args: Vec<String> = env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["server", ref address @ ..] => {
            let address = address.first().copied().unwrap_or("127.0.0.1:0");
            // Over TCP this would be: tokio::net::TcpListener::bind(address).await?
            serve(Listener::bind(&hub, address).await?).await
        }
        ["client", address] => ask(&hub, address, 1000).await,
        _ => {
            let listener = Listener::bind(&hub, "127.0.0.1:0").await?;
            let address = listener.local_addr()?.to_string();
            tokio::spawn(serve(listener));
            // Eight streams of one connection each, side by side.
            let asks = (0..8).map(|_| {
                let (hub, address) = (hub.clone(), address.clone());
                tokio::spawn(async move { ask(&hub, &address, 200).await })
            });
            for asked in asks.collect::<Vec<_>>() {
                asked.await??;
            }
            Ok(())
        }
    }
}
