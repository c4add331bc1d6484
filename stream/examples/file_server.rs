//! A file server with hyper, over RDMA: `file_server FOLDER [ADDRESS]` serves a folder, `file_server get ADDRESS/FILE` prints a
//! file.
//!
//! Over TCP it is the same program with the line of `bind` in `main`, and that of `Connector`, as the comments there say.

use std::convert::Infallible;
use std::env;
use std::error::Error;
use std::io::Write as _;
use std::path::{Component, Path};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use ibverbs_stream::Hub;
use ibverbs_stream::hyper::Connector;
use ibverbs_stream::tokio::Listener;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The file of a request, if it is below the folder.
async fn file(folder: &Path, request: Request<Incoming>) -> Response<Full<Bytes>> {
    let answer = |status, bytes| {
        let mut response = Response::new(Full::new(bytes));
        *response.status_mut() = status;
        response
    };
    let path = Path::new(request.uri().path().trim_start_matches('/'));
    let is_below = path.components().all(|part| matches!(part, Component::Normal(_)));
    if request.method() != Method::GET || !is_below {
        return answer(StatusCode::BAD_REQUEST, Bytes::new());
    }
    match tokio::fs::read(folder.join(path)).await {
        Ok(bytes) => answer(StatusCode::OK, bytes.into()),
        Err(_) => answer(StatusCode::NOT_FOUND, Bytes::new()),
    }
}

async fn serve(listener: Listener, folder: &'static Path) -> Result<()> {
    println!("{}", listener.local_addr()?);
    loop {
        let (stream, _) = listener.accept().await?;
        tokio::spawn(async move {
            let service =
                service_fn(async |request| Ok::<_, Infallible>(file(folder, request).await));
            let builder = auto::Builder::new(TokioExecutor::new());
            // A client that is gone is no error of the server's.
            let _ = builder.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn get(hub: &Hub, uri: &str) -> Result<Bytes> {
    // Over TCP this would be: Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
    let client =
        Client::builder(TokioExecutor::new()).build::<_, Empty<Bytes>>(Connector::new(hub));
    let response = client.get(format!("http://{uri}").parse()?).await?;
    if response.status() != StatusCode::OK {
        return Err(response.status().to_string().into());
    }
    Ok(response.into_body().collect().await?.to_bytes())
}

#[tokio::main]
async fn main() -> Result<()> {
    // Where there is no RDMA device, one of software.
    let _software = ibverbs_software::register_if_none()?;
    let hub = Hub::open(None)?;
    let args: Vec<String> = env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["get", uri] => std::io::stdout().write_all(&get(&hub, uri).await?)?,
        [folder, ref address @ ..] => {
            let address = address.first().copied().unwrap_or("127.0.0.1:0");
            // Over TCP this would be: tokio::net::TcpListener::bind(address).await?;
            let listener = Listener::bind(&hub, address).await?;
            let folder: &'static Path = Path::new(Box::leak(folder.to_owned().into_boxed_str()));
            serve(listener, folder).await?;
        }
        [] => {
            // Both in one program, to see it work.
            let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/examples"));
            let listener = Listener::bind(&hub, "127.0.0.1:0").await?;
            let address = listener.local_addr()?;
            tokio::spawn(serve(listener, folder));
            let bytes = get(&hub, &format!("{address}/file_server.rs")).await?;
            println!("{} bytes over RDMA", bytes.len());
            assert!(bytes == include_bytes!("file_server.rs")[..]);
        }
    }
    Ok(())
}
