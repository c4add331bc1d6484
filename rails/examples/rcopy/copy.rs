//! The two sides of a copy.
//!
//! The receiver has a few slots, and the sender as many. The sender reads a part of the file to a slot, writes it to the
//! receiver's with a notification, and says its checksum by a message. The receiver writes the part to its file and
//! says that the slot is free.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crc32fast::Hasher;
use ibverbs::AccessFlags;
use ibverbs_rails::{Event, PeerId, RailMemory, Rails, RemoteRailMemory, Transfer};
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::bars::Bars;

/// The bytes of a part, and how many are under way.
const PART: usize = 8 << 20;
const SLOTS: u64 = 4;
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
    /// The part is in the file.
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
}

impl Link {
    fn say(&mut self, word: &Word) -> Result<()> {
        let bytes = bincode::serde::encode_to_vec(word, bincode::config::standard())?;
        self.rails.send(self.peer, bytes)?;
        Ok(())
    }

    /// The next word of the peer's, or a notification.
    fn next(&mut self) -> Result<Heard> {
        loop {
            match self.rails.wait_event(Instant::now() + PATIENCE)? {
                Event::Message { bytes, .. } => {
                    let config = bincode::config::standard();
                    return Ok(Heard::Word(bincode::serde::decode_from_slice(&bytes, config)?.0));
                }
                Event::Notified { tag, .. } => return Ok(Heard::Notified(tag.into())),
                Event::Ended { result, .. } => result?,
                Event::Disconnected { error, .. } => return Err(error.into()),
                event => self.bars.iter().for_each(|bars| bars.note(&event)),
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

fn slots(rails: &Rails, access: AccessFlags) -> Result<RailMemory> {
    Ok(rails.allocate(SLOTS as usize * PART, access)?)
}

fn slot(number: u64) -> usize {
    (number % SLOTS) as usize * PART
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

pub(crate) fn send(mut rails: Rails, host: (&str, u16), path: PathBuf) -> Result<()> {
    let file = File::open(&path)?;
    let length = file.metadata()?.len();
    let memory = slots(&rails, AccessFlags::empty())?;
    let peer = rails.connect(host, Instant::now() + PATIENCE)?;
    let mut link = Link { rails, peer, bars: None };
    link.say(&Word::Offer { length })?;
    let (offset, mut whole, theirs) = match link.next()? {
        Heard::Word(Word::Have { length: have, checksum, memory }) if have <= length => {
            let hasher = checksum_of(&file, have)?;
            match hasher.clone().finalize() == checksum {
                true => (have, hasher, memory),
                false => (0, Hasher::new(), memory),
            }
        }
        Heard::Word(Word::Have { memory, .. }) => (0, Hasher::new(), memory),
        Heard::Word(word) => return Err(unexpected(&word)),
        Heard::Notified(_) => return Err("the peer has written".into()),
    };
    link.say(&Word::From { offset })?;
    link.bars = Some(Bars::new(&link.rails, peer, length, offset)?);
    if offset > 0 {
        eprintln!("goes on at byte {offset}");
    }
    let began = Instant::now();
    let parts = (length - offset).div_ceil(PART as u64);
    let (mut next, mut taken) = (0, 0);
    let mut bytes = vec![0; PART];
    while taken < parts {
        while next < parts && next < taken + SLOTS {
            let len = length_of(next, offset, length);
            let bytes = &mut bytes[..len];
            file.read_exact_at(bytes, offset + next * PART as u64)?;
            memory.write(slot(next), bytes)?;
            whole.update(bytes);
            let range = slot(next)..slot(next) + len;
            let write = Transfer::write(memory.slice(range.clone())?, theirs.slice(range)?);
            link.rails.post(peer, write.notify(next as u16))?;
            link.say(&Word::Part { number: next, checksum: crc32fast::hash(bytes) })?;
            next += 1;
        }
        match link.next()? {
            Heard::Word(Word::Taken { number }) if number == taken => taken += 1,
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

pub(crate) fn receive(mut rails: Rails, port: u16, path: PathBuf) -> Result<()> {
    let mut part = path.clone().into_os_string();
    part.push(".part");
    let part = PathBuf::from(part);
    let file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&part)?;
    let memory = slots(&rails, AccessFlags::REMOTE_WRITE)?;
    let listener = TcpListener::bind(("::", port))?;
    // A day is long enough for any sender to come.
    let peer = rails.accept(&listener, Instant::now() + Duration::from_secs(86_400))?;
    let mut link = Link { rails, peer, bars: None };
    let length = match link.next()? {
        Heard::Word(Word::Offer { length }) => length,
        _ => return Err("the peer offers nothing".into()),
    };
    // All whole parts are good, since they were checked.
    let have = file.metadata()?.len();
    let before = checksum_of(&file, have)?;
    let checksum = before.clone().finalize();
    link.say(&Word::Have { length: have, checksum, memory: memory.remote() })?;
    let offset = match link.next()? {
        Heard::Word(Word::From { offset }) if offset == have || offset == 0 => offset,
        _ => return Err("the peer does not say where it goes on".into()),
    };
    let mut whole = if offset == have { before } else { Hasher::new() };
    file.set_len(offset)?;
    link.bars = Some(Bars::new(&link.rails, peer, length, offset)?);
    let parts = (length - offset).div_ceil(PART as u64);
    // What has come of each slot: its notification, and its checksum.
    let mut notified = [false; SLOTS as usize];
    let mut checksums = [None; SLOTS as usize];
    let mut bytes = vec![0; PART];
    let (mut next, mut end) = (0, None);
    while next < parts || end.is_none() {
        match link.next()? {
            Heard::Notified(tag) => notified[(tag % SLOTS) as usize] = true,
            Heard::Word(Word::Part { number, checksum }) => {
                checksums[(number % SLOTS) as usize] = Some(checksum);
            }
            Heard::Word(Word::End { checksum }) => end = Some(checksum),
            Heard::Word(word) => return Err(unexpected(&word)),
        }
        while next < parts
            && notified[(next % SLOTS) as usize]
            && let Some(checksum) = checksums[(next % SLOTS) as usize]
        {
            let bytes = &mut bytes[..length_of(next, offset, length)];
            memory.read(slot(next), bytes)?;
            if crc32fast::hash(bytes) != checksum {
                return Err(format!("part {next} came with other bytes than it was sent").into());
            }
            file.write_all_at(bytes, offset + next * PART as u64)?;
            whole.update(bytes);
            notified[(next % SLOTS) as usize] = false;
            checksums[(next % SLOTS) as usize] = None;
            link.say(&Word::Taken { number: next })?;
            next += 1;
            link.update(length.min(offset + next * PART as u64));
        }
    }
    let checksum = whole.finalize();
    if end != Some(checksum) {
        return Err("the whole has another checksum".into());
    }
    file.sync_all()?;
    std::fs::rename(&part, &path)?;
    link.say(&Word::Done)?;
    // The sender closes when it has heard that.
    while !matches!(link.rails.wait_event(Instant::now() + PATIENCE)?, Event::Disconnected { .. }) {
    }
    eprintln!("{length} bytes are there, checksum {checksum:08x}");
    Ok(())
}
