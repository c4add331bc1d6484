//! hyper and tonic over streams, with their own servers and clients.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use ibverbs_software::Device;
use ibverbs_stream::hyper::Connector;
use ibverbs_stream::tokio::Listener;
use ibverbs_stream::tonic::{Incoming, RdmaConnectInfo};
use ibverbs_stream::{Hub, HubBuilder};
use tonic::body::Body;
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

/// A hub on a device of its own, which is kept.
fn hub(set: impl FnOnce(HubBuilder) -> HubBuilder) -> (Hub, Device) {
    let device = Device::new().unwrap();
    let builder = Hub::builder(&Arc::new(device.open().unwrap())).max_connections(16);
    (set(builder).build().unwrap(), device)
}

async fn ends<T>(test: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(120), test).await.expect("it never ends")
}

/// Small and large bodies, there and back.
async fn http(http2: bool, tasks: usize, set: fn(HubBuilder) -> HubBuilder) {
    let ((server, _one), (client, _two)) = (hub(set), hub(set));
    let listener = Listener::bind(&server, "127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let serve = tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let echo = async |request: http::Request<hyper::body::Incoming>| {
                    let body = request.into_body().collect().await?.to_bytes();
                    Ok::<_, hyper::Error>(http::Response::new(Full::new(body)))
                };
                let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                let service = hyper::service::service_fn(echo);
                let _ = builder.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    });
    let client = hyper_util::client::legacy::Client::builder(TokioExecutor::new())
        .http2_only(http2)
        .build::<_, Full<Bytes>>(Connector::new(&client));
    let all: Vec<_> = (0..tasks)
        .map(|task| {
            let client = client.clone();
            tokio::spawn(async move {
                for n in 0..40 {
                    let len = if n % 10 == 9 { 300_000 } else { 100 };
                    let body = Bytes::from(vec![(task + n) as u8; len]);
                    let request = http::Request::post(format!("http://{address}/"));
                    let request = request.body(Full::new(body.clone())).unwrap();
                    let answer = client.request(request).await.unwrap();
                    assert!(answer.into_body().collect().await.unwrap().to_bytes() == body);
                }
            })
        })
        .collect();
    for task in all {
        task.await.unwrap();
    }
    serve.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hyper_speaks_http_1() {
    ends(http(false, 2, |hub| hub)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hyper_speaks_http_2_on_one_connection() {
    ends(http(true, 8, |hub| hub.chunk(4096))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hyper_speaks_http_2_with_shared_receives() {
    ends(http(true, 4, |hub| hub.chunk(4096).receives(4).shared_receives(16))).await;
}

#[derive(Clone, PartialEq, prost::Message)]
struct Text {
    #[prost(string, tag = "1")]
    text: String,
}

type Codec = ProstCodec<Text, Text>;

#[derive(Clone)]
struct Echo;

impl tonic::server::NamedService for Echo {
    const NAME: &'static str = "echo.Echo";
}

impl tonic::server::StreamingService<Text> for Echo {
    type Response = Text;
    type ResponseStream = Streaming<Text>;
    type Future = std::future::Ready<Result<Response<Streaming<Text>>, Status>>;

    fn call(&mut self, request: Request<Streaming<Text>>) -> Self::Future {
        let info = request.extensions().get::<RdmaConnectInfo>().copied();
        std::future::ready(match info {
            Some(RdmaConnectInfo { remote_addr: Some(peer), .. }) if peer.ip().is_loopback() => {
                Ok(Response::new(request.into_inner()))
            }
            info => Err(Status::new(Code::Internal, format!("{info:?}"))),
        })
    }
}

impl tower_service::Service<http::Request<Body>> for Echo {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async {
            Ok(tonic::server::Grpc::new(Codec::default()).streaming(Echo, request).await)
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tonic_has_eight_streams_in_both_directions() {
    ends(async {
        let ((server, _one), (client, _two)) = (hub(|hub| hub), hub(|hub| hub));
        let listener = Listener::bind(&server, "127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serve = tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(Echo)
                .serve_with_incoming(Incoming::from(listener)),
        );
        let endpoint = tonic::transport::Endpoint::try_from(format!("http://{address}")).unwrap();
        let channel = endpoint.connect_with_connector(Connector::new(&client)).await.unwrap();
        let all: Vec<_> = (0..8)
            .map(|stream| {
                let mut grpc = tonic::client::Grpc::new(channel.clone());
                tokio::spawn(async move {
                    grpc.ready().await.unwrap();
                    let text = move |n: usize| Text {
                        text: format!("{stream} {n} {}", "x".repeat(n * 37 % 5000)),
                    };
                    let texts = Request::new(tokio_stream::iter((0..200).map(text)));
                    let path = http::uri::PathAndQuery::from_static("/echo.Echo/Chat");
                    let answers = grpc.streaming(texts, path, Codec::default()).await.unwrap();
                    let (mut answers, mut n) = (answers.into_inner(), 0);
                    while let Some(answer) = answers.message().await.unwrap() {
                        assert_eq!(answer, text(n));
                        n += 1;
                    }
                    assert_eq!(n, 200);
                })
            })
            .collect();
        for task in all {
            task.await.unwrap();
        }
        serve.abort();
    })
    .await;
}

/// The stream is plain, and a URI of `https` says that it is not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_uri_of_another_scheme_is_refused_unless_told() {
    ends(async {
        use tower_service::Service as _;
        let ((server, _one), (client, _two)) = (hub(|hub| hub), hub(|hub| hub));
        let listener = Listener::bind(&server, "127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let accepts = tokio::spawn(async move { listener.accept().await.map(drop) });
        for scheme in ["https", "ftp"] {
            let uri: http::Uri = format!("{scheme}://{address}/").parse().unwrap();
            let error = Connector::new(&client).call(uri).await.unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
            assert!(error.to_string().contains(scheme), "{error}");
        }
        let uri: http::Uri = format!("https://{address}/").parse().unwrap();
        Connector::new(&client).any_scheme().call(uri).await.unwrap();
        accepts.await.unwrap().unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_host_that_is_not_found_is_named() {
    ends(async {
        use tower_service::Service as _;
        let (client, _device) = hub(|hub| hub);
        // No name is so long, so that nobody is asked for it.
        let host = "x".repeat(64);
        for connector in [Connector::new(&client), Connector::rdmacm(&client)] {
            let uri: http::Uri = format!("http://{host}:1/").parse().unwrap();
            let error = connector.clone().call(uri).await.unwrap_err();
            assert!(error.to_string().contains(&host), "{error}");
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_of_tonic_ends_with_its_hub() {
    ends(async {
        let ((server, _one), (client, _two)) = (hub(|hub| hub), hub(|hub| hub));
        let listener = Listener::bind(&server, "127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serve = tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(Echo)
                .serve_with_incoming(Incoming::from(listener)),
        );
        // When a client has connected, the server is accepting.
        let connects = ibverbs_stream::tokio::Stream::connect(&client, address);
        let _client = connects.await.unwrap();
        assert!(!serve.is_finished());
        server.stop();
        serve.await.unwrap().unwrap();
    })
    .await;
}

#[cfg(feature = "axum")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn axum_serves_and_knows_its_clients() {
    use ::axum::extract::ConnectInfo;
    use ::axum::routing::get;

    ends(async {
        let ((server, _one), (client, _two)) = (hub(|hub| hub), hub(|hub| hub));
        let listener = Listener::bind(&server, "127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let who = async |ConnectInfo(info): ConnectInfo<RdmaConnectInfo>| {
            info.remote_addr.unwrap().ip().to_string()
        };
        let app = ::axum::Router::new().route("/", get(who));
        let app = app.into_make_service_with_connect_info::<RdmaConnectInfo>();
        let serve = tokio::spawn(async move { ::axum::serve(listener, app).await });
        let client = hyper_util::client::legacy::Client::builder(TokioExecutor::new())
            .build::<_, Full<Bytes>>(Connector::new(&client));
        let request = http::Request::get(format!("http://{address}/"));
        let answer = client.request(request.body(Full::default()).unwrap()).await.unwrap();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(&body[..], b"127.0.0.1");
        serve.abort();
    })
    .await;
}
