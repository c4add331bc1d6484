//! The two sides of a copy.
//!
//! Of a file, a side has a few slots for parts in memory; what is in memory has its own place for each part. The sender
//! reads a part of the file to a slot, writes it to the receiver's with a notification, and says its checksum by a
//! message. The receiver writes the part to its file and says that it has it.

use std::collections::{HashMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crc32fast::Hasher;
use ibverbs::AccessFlags;
use ibverbs_rails::{
    Event, PeerId, RailMemory, Rails, RailsError, RemoteRailMemory, Transfer, TransferId,
};
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::bars::Bars;

/// The bytes of a part, and how many parts are under way.
const PART: usize = 8 << 20;
const WINDOW: u64 = 4;
/// So long nothing may happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the sides say to each other.
#[derive(Debug, Serialize, Deserialize)]
enum Word {
    /// From the sender, first.
    Offer {
        length: u64,
    },
    /// The receiver has these bytes already, with this checksum.
    Have {
        length: u64,
        checksum: u32,
        memory: RemoteRailMemory,
    },
    /// The sender goes on from there.
    From {
        offset: u64,
    },
    /// A part was written to the memory. It has this checksum.
    Part {
        number: u64,
        checksum: u32,
    },
    /// This part and those before it are in the file.
    Taken {
        number: u64,
    },
    /// The whole has this checksum, with what was there before.
    End {
        checksum: u32,
    },
    Done,
}

/// A peer, and what happens with it.
struct Link {
    rails: Rails,
    peer: PeerId,
    bars: Option<Bars>,
    /// What is under way.
    posted: HashMap<TransferId, Post>,
    /// What waits for a rail, since all are down.
    waiting: VecDeque<Post>,
}

#[derive(Clone)]
enum Post {
    Word(Vec<u8>),
    Transfer(Transfer),
}

impl Link {
    fn new(rails: Rails, peer: PeerId) -> Self {
        Self { rails, peer, bars: None, posted: HashMap::new(), waiting: VecDeque::new() }
    }

    fn say(&mut self, word: &Word) -> Result<()> {
        let bytes = bincode::serde::encode_to_vec(word, bincode::config::standard())?;
        self.post(Post::Word(bytes))
    }

    fn post(&mut self, post: Post) -> Result<()> {
        self.waiting.push_back(post);
        self.post_waiting()
    }

    fn post_waiting(&mut self) -> Result<()> {
        while let Some(post) = self.waiting.pop_front() {
            let posted = match post.clone() {
                Post::Word(bytes) => self.rails.send(self.peer, bytes),
                Post::Transfer(transfer) => self.rails.post(self.peer, transfer),
            };
            match posted {
                Ok(id) => drop(self.posted.insert(id, post)),
                Err(RailsError::AllRailsDown(_)) => {
                    self.waiting.push_front(post);
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// The next word of the peer's, or a notification. When all rails are down, it waits for one of them. What was under
    /// way then is posted again, so that a word may come twice.
    fn next(&mut self) -> Result<Heard> {
        loop {
            let event = self.rails.wait_event(Instant::now() + PATIENCE)?;
            self.bars.iter().for_each(|bars| bars.note(&event));
            match event {
                Event::Message { bytes, .. } => {
                    let config = bincode::config::standard();
                    return Ok(Heard::Word(bincode::serde::decode_from_slice(&bytes, config)?.0));
                }
                Event::Notified { tag, .. } => return Ok(Heard::Notified(tag.into())),
                Event::Ended { transfer, result, .. } => {
                    let post = self.posted.remove(&transfer);
                    match result {
                        Err(RailsError::AllRailsDown(_)) => self.waiting.extend(post),
                        result => result?,
                    }
                }
                Event::Disconnected { error, .. } => return Err(error.into()),
                Event::RailUp { .. } => self.post_waiting()?,
                _ => {}
            }
        }
    }

    fn update(&self, done: u64) {
        self.bars.iter().for_each(|bars| bars.update(&self.rails, done));
    }
}

enum Heard {
    Word(Word),
    Notified(u64),
}

fn unexpected(word: &Word) -> Box<dyn std::error::Error> {
    format!("the peer has said {word:?}").into()
}

/// The length of a part of a file.
fn length_of(number: u64, offset: u64, length: u64) -> usize {
    (length - offset - number * PART as u64).min(PART as u64) as usize
}

/// What is copied, or the copy.
pub(crate) enum Data {
    File(PathBuf),
    /// So many bytes of memory; of the receiver's: at most.
    Memory(u64),
}

/// Where parts are in the memory of this length: those of a file take turns.
fn place(number: u64, memory: u64) -> usize {
    (number % memory.div_ceil(PART as u64)) as usize * PART
}

/// Allocates memory for the file, or for `length` bytes if there is no file.
fn allocate(
    rails: &Rails,
    file: Option<&File>,
    length: u64,
    access: AccessFlags,
) -> Result<RailMemory> {
    let length = if file.is_some() { WINDOW * PART as u64 } else { length.max(1) };
    Ok(rails.allocate(usize::try_from(length)?, access)?)
}

/// The checksum of the first bytes of a file.
fn checksum_of(file: &File, length: u64) -> Result<Hasher> {
    let (mut hasher, mut bytes) = (Hasher::new(), vec![0; PART]);
    let mut file = file.take(length);
    loop {
        match file.read(&mut bytes)? {
            0 => return Ok(hasher),
            count => hasher.update(&bytes[..count]),
        }
    }
}

pub(crate) fn send(mut rails: Rails, host: (&str, u16), data: &Data) -> Result<()> {
    let (file, length) = match data {
        Data::File(path) => {
            let file = File::open(path)?;
            let length = file.metadata()?.len();
            (Some(file), length)
        }
        Data::Memory(length) => (None, *length),
    };
    let memory = allocate(&rails, file.as_ref(), length, AccessFlags::empty())?;
    let mut bytes = vec![0; PART];
    if file.is_none() {
        let mut random = fastrand::Rng::new();
        for part in 0..length.div_ceil(PART as u64) {
            let bytes = &mut bytes[..length_of(part, 0, length)];
            random.fill(bytes);
            memory.write(part as usize * PART, bytes)?;
        }
    }
    let peer = rails.connect(host, Instant::now() + PATIENCE)?;
    let mut link = Link::new(rails, peer);
    link.say(&Word::Offer { length })?;
    let (have, checksum, theirs) = match link.next()? {
        Heard::Word(Word::Have { length, checksum, memory }) => (length, checksum, memory),
        Heard::Word(word) => return Err(unexpected(&word)),
        Heard::Notified(_) => return Err("the peer has written".into()),
    };
    // If it has something else, all of it is sent.
    let before = match &file {
        Some(file) if have <= length => Some(checksum_of(file, have)?),
        _ => None,
    };
    let before = before.filter(|before| before.clone().finalize() == checksum);
    let (offset, mut whole) = before.map_or((0, Hasher::new()), |before| (have, before));
    link.say(&Word::From { offset })?;
    link.bars = Some(Bars::new(&link.rails, peer, length, offset)?);
    if offset > 0 {
        eprintln!("goes on at byte {offset}");
    }
    let began = Instant::now();
    let parts = (length - offset).div_ceil(PART as u64);
    let (mut next, mut taken) = (0, 0);
    while taken < parts {
        while next < parts && next < taken + WINDOW {
            let len = length_of(next, offset, length);
            let bytes = &mut bytes[..len];
            let (start, to) = (place(next, memory.len() as u64), place(next, theirs.len()));
            match &file {
                Some(file) => {
                    file.read_exact_at(bytes, offset + next * PART as u64)?;
                    memory.write(start, bytes)?;
                }
                None => memory.read(start, bytes)?,
            }
            whole.update(bytes);
            let write =
                Transfer::write(memory.slice(start..start + len)?, theirs.slice(to..to + len)?);
            link.post(Post::Transfer(write.notify(next as u16)))?;
            link.say(&Word::Part { number: next, checksum: crc32fast::hash(bytes) })?;
            next += 1;
        }
        match link.next()? {
            Heard::Word(Word::Taken { number }) if number < next => taken = taken.max(number + 1),
            Heard::Word(word) => return Err(unexpected(&word)),
            Heard::Notified(_) => return Err("the peer has written".into()),
        }
        link.update(length.min(offset + taken * PART as u64));
    }
    link.say(&Word::End { checksum: whole.finalize() })?;
    match link.next()? {
        Heard::Word(Word::Done) => {}
        _ => return Err("the peer has not said that it is done".into()),
    }
    let (sent, time) = (length - offset, began.elapsed().as_secs_f64());
    eprintln!("{sent} bytes in {time:.2} s, {:.1} MB/s", sent as f64 / time / 1e6);
    for (name, bytes) in link.rails.devices().zip(link.rails.bytes_carried(peer)) {
        eprintln!("{name} has carried {bytes} bytes");
    }
    Ok(())
}

/// The file that is not whole yet, and what becomes of it.
fn part_file(path: &Path) -> Result<(File, PathBuf)> {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    let part = PathBuf::from(part);
    let file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&part)?;
    Ok((file, part))
}

pub(crate) fn receive(mut rails: Rails, port: u16, data: &Data) -> Result<()> {
    let file = match data {
        Data::File(path) => Some(part_file(path)?),
        Data::Memory(_) => None,
    };
    let file = file.as_ref().map(|(file, part)| (file, part));
    let listener = TcpListener::bind(("::", port))?;
    // A day is long enough for any sender to come.
    let peer = rails.accept(&listener, Instant::now() + Duration::from_secs(86_400))?;
    let mut link = Link::new(rails, peer);
    let length = match link.next()? {
        Heard::Word(Word::Offer { length }) => length,
        _ => return Err("the peer offers nothing".into()),
    };
    if let Data::Memory(room) = *data
        && length > room
    {
        return Err(format!("the peer offers {length} bytes, and there is room for {room}").into());
    }
    let only = file.map(|(file, _)| file);
    let memory = allocate(&link.rails, only, length, AccessFlags::REMOTE_WRITE)?;
    // All bytes of the file are good, since each part was checked.
    let (have, before) = match only {
        Some(file) => {
            let have = file.metadata()?.len();
            (have, checksum_of(file, have)?)
        }
        None => (0, Hasher::new()),
    };
    let checksum = before.clone().finalize();
    link.say(&Word::Have { length: have, checksum, memory: memory.remote() })?;
    let offset = match link.next()? {
        Heard::Word(Word::From { offset }) if offset == have || offset == 0 => offset,
        _ => return Err("the peer does not say where it goes on".into()),
    };
    let mut whole = if offset == have { before } else { Hasher::new() };
    only.map_or(Ok(()), |file| file.set_len(offset))?;
    link.bars = Some(Bars::new(&link.rails, peer, length, offset)?);
    let parts = (length - offset).div_ceil(PART as u64);
    // What has come of each part under way: its notification, and its checksum.
    let mut notified = [false; WINDOW as usize];
    let mut checksums = [None; WINDOW as usize];
    let mut bytes = vec![0; PART];
    let (mut next, mut end) = (0, None);
    while next < parts || end.is_none() {
        match link.next()? {
            // The others have come before.
            Heard::Notified(tag) if tag.wrapping_sub(next) & 0xffff < WINDOW => {
                notified[(tag % WINDOW) as usize] = true;
            }
            Heard::Notified(_) => {}
            Heard::Word(Word::Part { number, checksum }) if number >= next => {
                checksums[(number % WINDOW) as usize] = Some(checksum);
            }
            Heard::Word(Word::Part { .. }) => {}
            Heard::Word(Word::End { checksum }) => end = Some(checksum),
            Heard::Word(word) => return Err(unexpected(&word)),
        }
        while next < parts
            && notified[(next % WINDOW) as usize]
            && let Some(checksum) = checksums[(next % WINDOW) as usize]
        {
            let bytes = &mut bytes[..length_of(next, offset, length)];
            memory.read(place(next, memory.len() as u64), bytes)?;
            if crc32fast::hash(bytes) != checksum {
                return Err(format!("part {next} came with other bytes than it was sent").into());
            }
            if let Some(file) = only {
                file.write_all_at(bytes, offset + next * PART as u64)?;
            }
            whole.update(bytes);
            notified[(next % WINDOW) as usize] = false;
            checksums[(next % WINDOW) as usize] = None;
            link.say(&Word::Taken { number: next })?;
            next += 1;
            link.update(length.min(offset + next * PART as u64));
        }
    }
    let checksum = whole.finalize();
    if end != Some(checksum) {
        return Err("the whole has another checksum".into());
    }
    if let (Some((file, part)), Data::File(path)) = (file, data) {
        file.sync_all()?;
        std::fs::rename(part, path)?;
    }
    link.say(&Word::Done)?;
    // The sender closes when it has heard that.
    while !matches!(link.rails.wait_event(Instant::now() + PATIENCE)?, Event::Disconnected { .. }) {
    }
    eprintln!("{length} bytes are there, checksum {checksum:08x}");
    Ok(())
}
