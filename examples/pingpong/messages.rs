//! The bytes of the messages, and the checks of received messages.

/// The byte that fills the C tool's messages, except for a zero at the start of each page with `--chk`.
pub(crate) const FILLING: u8 = 0x7b;

/// All page sizes are multiples of this.
const PAGE: usize = 4096;

/// The number of different messages, after which the sequence repeats.
const PERIOD: usize = 251;

/// The messages that are sent and expected.
pub(crate) struct Messages {
    template: Vec<u8>,
    message: Vec<u8>,
    /// The message of a client that is the C tool: always the same.
    from_c_tool: Option<Vec<u8>>,
}

impl Messages {
    pub(crate) fn new(size: usize) -> Self {
        let byte = |index: u64| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
        let template = (1..=(size + PERIOD) as u64).map(byte).collect();
        Self { template, message: vec![0; size], from_c_tool: None }
    }

    /// The message of our client: zero where the C tool, as the server, expects zero.
    pub(crate) fn of_round(&mut self, round: u64) -> &[u8] {
        let (start, size) = ((round % PERIOD as u64) as usize, self.message.len());
        self.message.copy_from_slice(&self.template[start..start + size]);
        self.message.iter_mut().step_by(PAGE).for_each(|byte| *byte = 0);
        &self.message
    }

    /// Checks a message from the client, which may be ours or the C tool.
    pub(crate) fn check_client(
        &mut self,
        message: &[u8],
        round: u64,
    ) -> std::result::Result<(), String> {
        if let Some(expected) = &self.from_c_tool {
            return compare(message, expected);
        }
        let checked = compare(message, self.of_round(round));
        let from_c_tool =
            |(index, &byte): (usize, &u8)| byte == FILLING || (byte == 0 && index % PAGE == 0);
        if checked.is_err() && round == 0 && message.iter().enumerate().all(from_c_tool) {
            self.from_c_tool = Some(message.to_vec());
            return Ok(());
        }
        checked
    }
}

pub(crate) fn compare(message: &[u8], expected: &[u8]) -> std::result::Result<(), String> {
    if message == expected {
        return Ok(());
    }
    let mut pairs = message.iter().zip(expected).enumerate();
    match pairs.find(|(_, (byte, expected))| byte != expected) {
        Some((index, (byte, expected))) => {
            Err(format!("byte {index} is {byte:#04x}, not {expected:#04x}"))
        }
        None => Err(format!("{} bytes, not {}", message.len(), expected.len())),
    }
}
