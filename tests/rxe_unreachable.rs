//! The connection manager where the kernel has devices that this process cannot use, as in a container or without rights:
//! the error names the device and what is missing, as `devices` and `open` do. To be run by `script/test rxe`, in a machine of
//! its own, because it changes the device files.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};
use std::{env, fs};

use ibverbs::rdmacm::{Listener, Route};

const FILES: &str = "/dev/infiniband";
const AWAY: &str = "/dev/infiniband-away";
const NOBODY: u32 = 65534;
const FILES_USED_UP: &str = "RLIMIT_NOFILE";

/// The errors of listening at one address and of resolving another one.
fn errors(own: &str, peer: &str) -> [String; 2] {
    let [own, peer] = [own, peer].map(|address| address.parse::<SocketAddr>().unwrap());
    let bound = Listener::bind(own).map(drop).map_err(|error| error.to_string());
    let route = Route::resolve(peer, Instant::now() + Duration::from_secs(60));
    let resolved = route.map(drop).map_err(|error| error.to_string());
    [bound, resolved].map(|result| result.err().unwrap_or_else(|| "it succeeds".to_owned()))
}

#[test]
fn what_cannot_be_used_is_named() {
    if let Ok(expected) = env::var("IBVERBS_TEST_EXPECTED") {
        let [own, peer] =
            ["OWN", "PEER"].map(|name| env::var(format!("IBVERBS_TEST_{name}")).unwrap());
        if expected != FILES_USED_UP {
            for error in errors(&own, &peer) {
                assert!(error.contains(&expected), "{error}");
            }
            return;
        }
        // Each number of files that are left, until there are enough.
        let mut refused = 0;
        for left in 3.. {
            let limit = libc::rlimit { rlim_cur: left, rlim_max: 4096 };
            // SAFETY: the structure is valid.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
            let errors = errors(&own, &peer);
            let wrong = errors.iter().filter(|error| *error != "it succeeds").count();
            for error in errors {
                assert!(error == "it succeeds" || error.contains(&expected), "{left}: {error}");
            }
            refused += wrong;
            if wrong == 0 {
                break;
            }
        }
        assert!(refused > 4, "{refused}");
        return;
    }
    let (rxe0, rxe1) = ("10.77.0.1:7471", "10.77.0.2:7471");
    let check = |user: Option<u32>, own: &str, peer: &str, expected: &str| {
        // A process of its own: librdmacm looks at the devices once.
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "what_cannot_be_used_is_named", "--nocapture"]);
        command.env("IBVERBS_TEST_EXPECTED", expected);
        command.env("IBVERBS_TEST_OWN", own).env("IBVERBS_TEST_PEER", peer);
        if let Some(user) = user {
            command.uid(user);
        }
        let output = command.output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{expected}: {printed}");
    };
    // Addresses that no device has.
    check(None, "127.0.0.1:7471", "127.0.0.1:7471", "they have 10.77.0.1 (rxe0), 10.77.0.2 (rxe1)");
    check(None, rxe0, rxe1, FILES_USED_UP);
    let files: Vec<_> = fs::read_dir(FILES).unwrap().map(|file| file.unwrap().path()).collect();
    let uverbs = || files.iter().filter(|path| path.to_string_lossy().contains("uverbs"));
    // The process may not open the devices' files.
    for path in uverbs() {
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    }
    check(
        Some(NOBODY),
        rxe0,
        rxe1,
        "may not open /dev/infiniband/uverbs0, the file of the device rxe0",
    );
    // The process sees the connection manager's file alone.
    fs::create_dir(AWAY).unwrap();
    for path in uverbs() {
        fs::rename(path, format!("{AWAY}/{}", path.file_name().unwrap().display())).unwrap();
    }
    check(
        None,
        rxe0,
        rxe1,
        "the device rxe0, but this process sees no file /dev/infiniband/uverbs0",
    );
    // The folder is missing.
    fs::rename(FILES, format!("{FILES}-all")).unwrap();
    check(None, rxe0, rxe1, "sees no /dev/infiniband");
    // All of it again, as it was.
    fs::rename(format!("{FILES}-all"), FILES).unwrap();
    for path in uverbs() {
        fs::rename(format!("{AWAY}/{}", path.file_name().unwrap().display()), path).unwrap();
    }
    let listener = Listener::bind(rxe0.parse::<SocketAddr>().unwrap()).unwrap();
    drop(listener);
}
