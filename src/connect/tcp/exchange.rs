//! One state machine, fed with bytes: for streams that block, are polled or are stepped.

use std::io::{self, Read, Write};

use super::error::{ExchangeError, ExchangeStage};
use super::wire;
use crate::base::{StateError, debug};
use crate::connect::handshake::{Handshake, Step};
use crate::verbs::queue_pair::QueuePairEndpoint;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    Connects,
    Accepts,
}

/// The object comes back if it is not connected.
pub(crate) type Attempt<T, P> = Result<T, StateError<P, ExchangeError>>;

pub(crate) type Exchanged<P> = Attempt<(<P as Handshake>::Connected, Vec<u8>), P>;

/// Two sides that connect, as a state machine without a stream: the program carries its bytes. See
/// [`PreparedChannel::begin_accept`](crate::PreparedChannel::begin_accept).
///
/// Over a stream that does not block, call [`step`](Self::step). Otherwise, until it is [done](Self::advance), send
/// [`to_send`](Self::to_send), and feed it as many bytes as it [wants](Self::wants). Later bytes of the peer belong to
/// the program.
///
/// There is no deadline: [give up](Self::into_object) when the program's own timer says so.
#[must_use]
pub struct Exchange<P: Handshake> {
    role: Role,
    /// This side keeps the stream open as long as the channel.
    keeps: bool,
    stage: Stage<P>,
    /// To send; `sent` bytes are out.
    output: Vec<u8>,
    sent: usize,
    /// The next part so far, of `part` bytes.
    input: Vec<u8>,
    part: usize,
}

enum Stage<P: Handshake> {
    Header(P),
    Greeting(P, wire::Header),
    /// The side that connects waits for the verdict.
    Answered(P, QueuePairEndpoint, Vec<u8>),
    /// Our verdict goes out. The side that accepts then waits for the peer's.
    Shaken(P::Shaken, Vec<u8>),
    /// Tells the peer our verdict, or our version.
    Failed(P, ExchangeError),
}

impl<P: Handshake> Exchange<P> {
    pub(crate) fn new(prepared: P, role: Role, private_data: &[u8]) -> Attempt<Self, P> {
        let output = match wire::greeting(&prepared.endpoint(), private_data) {
            Ok(greeting) => greeting,
            Err(error) => return Err(StateError::new(prepared, error)),
        };
        // The side that accepts reads first.
        let sent = if role == Role::Accepts { output.len() } else { 0 };
        let (stage, input) = (Stage::Header(prepared), Vec::new());
        Ok(Self { role, keeps: false, stage, output, sent, input, part: wire::HEADER })
    }

    /// The stream stays open as long as the channel. The peer is told, and takes the end of the one for that of the other.
    pub(super) fn keeping(self, keeps: bool) -> Self {
        Self { keeps, ..self }
    }

    /// The bytes to send to the peer next. May be empty.
    pub fn to_send(&self) -> &[u8] {
        &self.output[self.sent..]
    }

    /// Notes that `len` bytes of [`to_send`](Self::to_send) were sent. A larger number counts as all.
    pub fn sent(&mut self, len: usize) {
        self.sent = self.sent.saturating_add(len).min(self.output.len());
    }

    /// How many bytes of the peer it needs next; 0 if it has something to send first, or is done.
    pub fn wants(&self) -> usize {
        if self.to_send().is_empty() { self.part - self.input.len() } else { 0 }
    }

    /// Feeds it bytes of the peer. Returns how many it took: no more than it [wants](Self::wants).
    pub fn received(&mut self, bytes: &[u8]) -> usize {
        let taken = bytes.len().min(self.wants());
        self.input.extend_from_slice(&bytes[..taken]);
        taken
    }

    /// Takes its next steps. Once it has the peer's address, it connects by `ibv_modify_qp`, for which the kernel may
    /// look up the peer's MAC address. Only a channel that is already in its loop holds up others meanwhile.
    ///
    /// # Errors
    ///
    /// See [`ExchangeError`]. The object comes back in the [`StateError`], for another attempt over another stream.
    /// Close this one.
    #[expect(clippy::type_complexity, reason = "what `Exchanged` has, or the same again")]
    pub fn advance(mut self) -> Attempt<Step<(P::Connected, Vec<u8>), Self>, P> {
        while self.wants() == 0 && self.to_send().is_empty() {
            self = match self.next_stage() {
                Ok(next) => next,
                Err(exchanged) => return exchanged.map(Step::Done),
            };
        }
        Ok(Step::Pending(self))
    }

    /// Carries its bytes over a stream that does not block, until the stream would. Then wait until the stream is
    /// readable if [`to_send`](Self::to_send) is empty, or else writable.
    ///
    /// # Errors
    ///
    /// Those of [`advance`](Self::advance).
    #[expect(clippy::type_complexity, reason = "what `Exchanged` has, or the same again")]
    pub fn step(
        mut self,
        stream: &mut (impl Read + Write + ?Sized),
    ) -> Attempt<Step<(P::Connected, Vec<u8>), Self>, P> {
        loop {
            self = match self.advance()? {
                Step::Pending(pending) => pending,
                done => return Ok(done),
            };
            let done = match self.to_send() {
                [] => {
                    let mut bytes = [0; 1024];
                    let most = self.wants().min(bytes.len());
                    let read = stream.read(&mut bytes[..most]);
                    read.map(|read| self.received(&bytes[..read.min(most)]))
                }
                bytes => {
                    let sent = stream.write(bytes);
                    sent.inspect(|&sent| self.sent(sent))
                }
            };
            match done {
                Ok(0) => return Err(self.fail(ExchangeError::Closed(ExchangeStage::Addresses))),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(Step::Pending(self));
                }
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    return Err(self.fail(ExchangeError::from_stream(error)));
                }
                _ => {}
            }
        }
    }

    /// Gives up, and returns the object for another attempt over another stream. Close this one.
    pub fn into_object(self) -> P {
        match self.stage {
            Stage::Header(prepared)
            | Stage::Greeting(prepared, _)
            | Stage::Answered(prepared, ..)
            | Stage::Failed(prepared, _) => prepared,
            Stage::Shaken(shaken, _) => P::take_back(shaken),
        }
    }

    pub(super) fn fail(self, error: ExchangeError) -> StateError<P, ExchangeError> {
        let error = match self.stage {
            Stage::Header(_) | Stage::Greeting(..) => error,
            Stage::Answered(..) | Stage::Shaken(..) => error.of_peer(),
            // The peer sees the end of the stream.
            Stage::Failed(prepared, error) => return StateError::new(prepared, error),
        };
        StateError::new(self.into_object(), error)
    }

    /// The input that the stage waits for is complete.
    fn next_stage(self) -> Result<Self, Exchanged<P>> {
        let Self { role, keeps, stage, output, input, .. } = self;
        // All output is out.
        let next = |stage, output, part| {
            Ok(Self { role, keeps, stage, output, sent: 0, input: Vec::new(), part })
        };
        match stage {
            Stage::Header(prepared) => {
                match wire::Header::parse(&input.try_into().expect("as many as are wanted")) {
                    Ok(header) => {
                        let part = header.endpoint + header.private_data;
                        // Kept until the greeting is read.
                        let mut greeted = next(Stage::Greeting(prepared, header), output, part)?;
                        greeted.sent = greeted.output.len();
                        Ok(greeted)
                    }
                    Err(error) => Err(Err(StateError::new(prepared, error))),
                }
            }
            // Read to its end even if refused: closing a TCP socket with unread data may lose the last data sent
            // to the peer.
            Stage::Greeting(prepared, header) => {
                let mut endpoint = input;
                let private_data = endpoint.split_off(header.endpoint);
                let checked = header.check();
                // Another version learns ours, other programs nothing.
                let answers = role == Role::Accepts
                    && matches!(checked, Ok(()) | Err(ExchangeError::Version { .. }));
                let answer = if answers { output } else { Vec::new() };
                match checked.and_then(|()| wire::endpoint(&header, &endpoint)) {
                    Err(error) => next(Stage::Failed(prepared, error), answer, 0),
                    Ok(remote) if role == Role::Connects => {
                        next(Stage::Answered(prepared, remote, private_data), answer, wire::VERDICT)
                    }
                    // After a failure too, it reads the peer's verdict.
                    Ok(remote) => {
                        let (stage, output) = shake(prepared, remote, private_data, answer, keeps);
                        next(stage, output, wire::VERDICT)
                    }
                }
            }
            // Both sides try, so that each can say what does not fit.
            Stage::Answered(prepared, remote, private_data) => {
                let verdict = verdict_in(input);
                let (stage, output) = shake(prepared, remote, private_data, Vec::new(), keeps);
                let stage = match (stage, verdict) {
                    (Stage::Shaken(mut shaken, private_data), Ok(peer_keeps)) => {
                        P::set_peer_keeps(&mut shaken, peer_keeps);
                        Stage::Shaken(shaken, private_data)
                    }
                    (Stage::Shaken(shaken, _), Err(error)) => {
                        Stage::Failed(P::take_back(shaken), error)
                    }
                    (stage, _) => stage,
                };
                next(stage, output, 0)
            }
            Stage::Shaken(mut shaken, private_data) => {
                let verdict = (role == Role::Accepts).then(|| verdict_in(input)).transpose();
                Err(match verdict {
                    Ok(peer_keeps) => {
                        if let Some(peer_keeps) = peer_keeps {
                            P::set_peer_keeps(&mut shaken, peer_keeps);
                        }
                        Ok((P::finish(shaken), private_data))
                    }
                    Err(error) => Err(StateError::new(P::take_back(shaken), error)),
                })
            }
            Stage::Failed(prepared, error) => Err(Err(StateError::new(prepared, error))),
        }
    }
}

/// Connects. Returns our verdict behind the bytes that must go first.
fn shake<P: Handshake>(
    prepared: P,
    remote: QueuePairEndpoint,
    private_data: Vec<u8>,
    mut output: Vec<u8>,
    keeps: bool,
) -> (Stage<P>, Vec<u8>) {
    let (stage, errno) = match prepared.handshake(remote) {
        Ok(shaken) => (Stage::Shaken(shaken, private_data), None),
        Err(StateError { error, object }) => {
            let errno = error.errno();
            (Stage::Failed(object, error.into()), Some(errno))
        }
    };
    output.extend(wire::verdict(errno, keeps));
    (stage, output)
}

fn verdict_in(input: Vec<u8>) -> Result<bool, ExchangeError> {
    wire::read_verdict(input.try_into().expect("as many as are wanted"))
}

debug! {
    impl[P: Handshake] Exchange<P>, self,
    role: self.role, to_send: self.to_send().len(), wants: self.wants(), ..
}
