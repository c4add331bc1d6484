//! `rcopy` between two processes, over two devices made of software: a copy that was interrupted goes on, and memory is
//! copied as files are.

#![forbid(unsafe_code)]

use std::fs;
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};

const SIGXFSZ: i32 = 25;

/// Two programs, with a folder and addresses of their own.
struct Programs {
    folder: PathBuf,
    network: String,
    /// The first address in it.
    first: u8,
    port: u16,
}

impl Programs {
    fn new(name: &str) -> Self {
        static NUMBER: AtomicU8 = AtomicU8::new(0);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        // The programs of this process, of which there may be several, have a network of their own.
        let [.., high, low] = std::process::id().to_be_bytes();
        let network = format!("127.{high}.{low}");
        let first = 10 * NUMBER.fetch_add(1, Ordering::Relaxed);
        let port = TcpListener::bind("[::]:0").unwrap().local_addr().unwrap().port();
        Self { folder, network, first, port }
    }

    /// Starts one of them, by a shell that does something before.
    fn start(&self, side: u8, before: &str, arguments: &[&str]) -> Child {
        // The example is beside the folder of this program.
        let program = std::env::current_exe().unwrap();
        let program = program.parent().and_then(Path::parent).unwrap().join("examples/rcopy");
        assert!(program.exists(), "cargo build --example rcopy");
        let device = |number| format!("{}.{}", self.network, self.first + side + number);
        Command::new("bash")
            .args(["-c", &format!("{before}; exec \"$@\""), "bash"])
            .arg(program)
            .args(["-p", &self.port.to_string()])
            .args(arguments)
            .env("IBVERBS_SOFTWARE", format!("one={},two={}", device(0), device(1)))
            .current_dir(&self.folder)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// Runs both. Returns what the receiver and the sender have printed, and how they have ended.
    fn run(&self, before: &str, receive: &[&str], send: &[&str]) -> [Output; 2] {
        let receiver = self.start(1, before, &[&["receive"], receive].concat());
        let sender = self.start(3, ":", &[&["send"], send, &["127.0.0.1"]].concat());
        let sender = sender.wait_with_output().unwrap();
        [receiver.wait_with_output().unwrap(), sender]
    }
}

fn text(output: &Output) -> String {
    format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr))
}

#[test]
fn an_interrupted_copy_goes_on() {
    const LENGTH: usize = 24_000_000;
    /// No whole number of parts.
    const LIMIT: usize = 10_000 << 10;
    let programs = Programs::new("interrupted");
    let file = |name: &str| programs.folder.join(name);
    let mut bytes = vec![0; LENGTH];
    fastrand::Rng::with_seed(1).fill(&mut bytes);
    fs::write(file("original"), &bytes).unwrap();

    // The kernel kills the receiver when it writes beyond the limit.
    let before = "ulimit -c 0; ulimit -f 10000";
    let [receiver, sender] = programs.run(before, &["copy"], &["original"]);
    assert_eq!(receiver.status.signal(), Some(SIGXFSZ), "{}", text(&receiver));
    assert!(!sender.status.success(), "{}", text(&sender));
    assert_eq!(fs::metadata(file("copy.part")).unwrap().len() as usize, LIMIT);
    assert!(!file("copy").exists());

    let [receiver, sender] = programs.run(":", &["copy"], &["original"]);
    assert!(receiver.status.success(), "{}", text(&receiver));
    let said = text(&sender);
    assert!(sender.status.success(), "{said}");
    for line in [format!("goes on at byte {LIMIT}"), format!("\n{} bytes in", LENGTH - LIMIT)] {
        assert!(said.contains(&line), "{line}: {said}");
    }
    let carried = said.lines().filter_map(|line| line.split_once(" has carried "));
    let carried =
        carried.map(|(_, bytes)| bytes.trim_end_matches(" bytes").parse::<usize>().unwrap());
    assert_eq!(carried.sum::<usize>(), LENGTH - LIMIT, "only the rest: {said}");
    assert!(fs::read(file("copy")).unwrap() == bytes, "the copy differs");
    assert!(!file("copy.part").exists());
    fs::remove_dir_all(&programs.folder).unwrap();
}

#[test]
fn memory_is_copied_as_files_are() {
    let programs = Programs::new("memory");
    let file = |name: &str| programs.folder.join(name);
    let ends = ["-m", "20000K"];
    let [receiver, sender] = programs.run(":", &ends, &ends);
    assert!(receiver.status.success(), "{}", text(&receiver));
    assert!(sender.status.success(), "{}", text(&sender));
    assert!(text(&receiver).contains("20480000 bytes are there"), "{}", text(&receiver));

    // Copying from memory to a file works.
    let [receiver, sender] = programs.run(":", &["copy"], &ends);
    assert!(receiver.status.success() && sender.status.success(), "{}", text(&receiver));
    assert_eq!(fs::metadata(file("copy")).unwrap().len(), 20_480_000);

    // Copying from a file to memory fails without room for it.
    let [receiver, sender] = programs.run(":", &["-m", "1M"], &["copy"]);
    assert!(!receiver.status.success() && !sender.status.success());
    assert!(text(&receiver).contains("there is room for 1048576"), "{}", text(&receiver));
    fs::remove_dir_all(&programs.folder).unwrap();
}
