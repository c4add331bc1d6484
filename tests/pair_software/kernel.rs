//! The machine with Soft-RoCE: runs programs as the other machine asks for them, over a TCP connection.

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::KERNEL;
use crate::two_machines::PATIENCE;

const PORT: u16 = 18000;

/// The packets that may wait for the network interface. When there are more, which 16 queue pairs with messages of
/// 64 KiB send at once, Soft-RoCE puts queue pairs into ERR; usual is 1,000.
pub(crate) const QUEUE: u32 = 20_000;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A connection to the machine with Soft-RoCE.
pub(crate) struct Kernel(BufReader<TcpStream>);

impl Kernel {
    pub(crate) fn connect() -> Result<Self> {
        let start = Instant::now();
        loop {
            match TcpStream::connect((KERNEL[0], PORT)) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    stream.set_read_timeout(Some(2 * PATIENCE))?;
                    return Ok(Self(BufReader::new(stream)));
                }
                Err(error) if start.elapsed() > PATIENCE => return Err(error.into()),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    fn ask(&mut self, line: &str) -> Result<String> {
        self.0.get_mut().write_all(format!("{line}\n").as_bytes())?;
        let mut answer = String::new();
        self.0.read_line(&mut answer)?;
        Ok(answer.trim_end().to_owned())
    }

    /// The index of this GID of rxe1.
    pub(crate) fn gid_index(&mut self, gid: ibverbs::Gid) -> Result<u8> {
        Ok(self.ask(&format!("gid {gid}"))?.parse()?)
    }

    /// Spoils what that machine sends.
    pub(crate) fn lose(&mut self, percent: u32) -> Result<()> {
        if percent == 0 {
            return Ok(());
        }
        let netem = format!("netem loss {percent}% limit {QUEUE}");
        self.start(&format!("tc qdisc replace dev eth0 root {netem}"))?;
        self.finish().map(drop)
    }

    /// Starts a program.
    pub(crate) fn start(&mut self, command: &str) -> Result<()> {
        match self.ask(&format!("run {command}"))?.as_str() {
            "started" => Ok(()),
            other => Err(other.into()),
        }
    }

    /// Waits until the program has ended, which must have succeeded; returns what it printed.
    pub(crate) fn finish(&mut self) -> Result<String> {
        self.end("wait")
    }

    /// Kills the program, if it still runs, and says what it printed.
    pub(crate) fn kill(&mut self) -> String {
        self.end("kill").unwrap_or_else(|error| error.to_string())
    }

    fn end(&mut self, how: &str) -> Result<String> {
        let answer = self.ask(how)?;
        let (status, length) = answer.split_once('|').ok_or_else(|| answer.clone())?;
        let mut output = vec![0; length.parse()?];
        self.0.read_exact(&mut output)?;
        let output = String::from_utf8_lossy(&output).into_owned();
        if status == "exit status: 0" {
            Ok(output)
        } else {
            Err(format!("{status}: {output}").into())
        }
    }

    /// The last of all.
    pub(crate) fn say_goodbye(mut self) -> Result<()> {
        self.ask("goodbye").map(drop)
    }
}

/// Serves one connection after the other, until one says goodbye.
pub(crate) fn serve() {
    let listener = TcpListener::bind(("0.0.0.0", PORT)).unwrap();
    loop {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_nodelay(true).unwrap();
        let mut program = None;
        for line in BufReader::new(stream.try_clone().unwrap()).lines() {
            let Ok(line) = line else { break };
            let answer = answer(&line, &mut program);
            if stream.write_all(&answer).is_err() {
                break;
            }
            if line == "goodbye" {
                // The answer may be lost; the peer's closing says that it has come.
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                let _ = stream.read(&mut [0]);
                return;
            }
        }
        if let Some(mut program) = program {
            kill(&mut program);
        }
    }
}

/// What Soft-RoCE has counted so far, of what it counts.
fn counters() -> String {
    let folder = "/sys/class/infiniband/rxe1/ports/1/hw_counters";
    let Ok(files) = std::fs::read_dir(folder) else { return format!("no {folder}") };
    let count = |file: std::fs::DirEntry| {
        let value = std::fs::read_to_string(file.path()).unwrap_or_default();
        let (name, value) = (file.file_name(), value.trim().to_owned());
        (value != "0").then(|| format!(" {}={value}", name.to_string_lossy()))
    };
    let counts: String = files.flatten().filter_map(count).collect();
    format!("Soft-RoCE counts{counts}")
}

/// Kills a program that runs in a group of its own, with what it has started.
pub(crate) fn kill(program: &mut Child) {
    // SAFETY: a plain system call, for a child that was not waited for.
    unsafe { libc::kill(-(program.id() as i32), libc::SIGKILL) };
    let _ = program.wait();
}

fn answer(line: &str, program: &mut Option<Child>) -> Vec<u8> {
    match line.split_once(' ').unwrap_or((line, "")) {
        ("run", command) => {
            let mut bash = Command::new("bash");
            let bash = bash.args(["-c", &format!("exec 2>&1; {command}")]).process_group(0);
            match bash.stdin(Stdio::null()).stdout(Stdio::piped()).spawn() {
                Ok(child) => {
                    *program = Some(child);
                    b"started\n".to_vec()
                }
                Err(error) => format!("{error}\n").into_bytes(),
            }
        }
        ("gid", wanted) => {
            let context = ibverbs::open("rxe1").unwrap();
            let table = context.gid_table().unwrap();
            let found = table.iter().find(|entry| entry.gid.to_string() == wanted);
            let index = found.map_or("no such GID".into(), |entry| entry.index.to_string());
            format!("{index}\n").into_bytes()
        }
        (how @ ("wait" | "kill"), _) => {
            let Some(mut child) = program.take() else { return b"no program\n".to_vec() };
            let start = Instant::now();
            while how == "wait" && child.try_wait().unwrap().is_none() && start.elapsed() < PATIENCE
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            kill(&mut child);
            let mut output = Vec::new();
            child.stdout.take().unwrap().read_to_end(&mut output).unwrap();
            if how == "kill" {
                output.extend(counters().as_bytes());
            }
            let status = child.wait().unwrap();
            let mut answer = format!("{status}|{}\n", output.len()).into_bytes();
            answer.extend(output);
            answer
        }
        _ => b"goodbye\n".to_vec(),
    }
}
