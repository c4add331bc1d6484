//! The devices that the environment variable `IBVERBS_SOFTWARE` names, for programs that run on any machine.

use std::io;
use std::net::IpAddr;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::device::{Device, invalid};

/// The environment variable.
const VARIABLE: &str = "IBVERBS_SOFTWARE";

/// If this is 1, its devices are [`Builder::one_sided`](crate::Builder::one_sided).
const ONE_SIDED: &str = "IBVERBS_SOFTWARE_ONE_SIDED";

/// If this is 1, its devices are [`Builder::strict`](crate::Builder::strict).
const STRICT: &str = "IBVERBS_SOFTWARE_STRICT";

/// Whether a variable is 1.
fn is_set(variable: &str) -> io::Result<bool> {
    match std::env::var_os(variable) {
        Some(value) if value == "1" => Ok(true),
        Some(value) if value.is_empty() || value == "0" => Ok(false),
        Some(value) => Err(invalid(&format!("{variable}: {value:?} is neither 0 nor 1"))),
        None => Ok(false),
    }
}

impl Device {
    /// Makes the devices that the environment variable `IBVERBS_SOFTWARE` names. `None`: it is not set. They are not
    /// registered.
    ///
    /// The variable has the names of the devices, with commas between. A name alone gets a free address of 127.0.0.0/8. Or
    /// `=` and addresses follow it: `+` stands between addresses of a port, and `/` between ports. So `soft0,soft1` are two
    /// devices, `soft0=127.0.0.5` is one with a known address, `soft0=192.0.2.7+2001:db8::7` has two addresses, and
    /// `soft0=127.0.0.5/127.0.0.6` two ports. An empty variable names no device. Tables of GIDs are as adapters have them: see
    /// [`Builder::adapter_gids`](crate::Builder::adapter_gids). If `IBVERBS_SOFTWARE_ONE_SIDED` is 1, the devices are
    /// [`one_sided`](crate::Builder::one_sided). If `IBVERBS_SOFTWARE_STRICT` is 1, they are
    /// [`strict`](crate::Builder::strict), and a completion that failed has an opcode and a length that no program can take
    /// for meant, as those of all other devices of this crate. Otherwise it has the opcode of its request: many bindings make
    /// an enum of it.
    ///
    /// # Errors
    ///
    /// [`InvalidInput`](io::ErrorKind::InvalidInput): a variable is not of that form, or names a device twice. Otherwise
    /// those of [`Builder::build`](crate::Builder::build). The text names the variable.
    pub fn from_environment() -> io::Result<Option<Vec<Self>>> {
        let Some(value) = std::env::var_os(VARIABLE) else { return Ok(None) };
        let value = value.into_string().map_err(|_| invalid("IBVERBS_SOFTWARE: it is not text"))?;
        let (one_sided, strict) = (is_set(ONE_SIDED)?, is_set(STRICT)?);
        let make = |(name, ports): (&str, Vec<Vec<IpAddr>>)| {
            let mut builder = Self::builder().name(name).strict(strict);
            builder.settings.garbles = strict;
            let builder = ports.into_iter().fold(builder, |builder, port| builder.port(port));
            builder
                .adapter_gids(true)
                .one_sided(one_sided)
                .build()
                .map_err(|e| prefixed(&e, &format!("{VARIABLE}: device {name:?}")))
        };
        parse(&value)?.into_iter().map(make).collect::<io::Result<_>>().map(Some)
    }
}

type Named<'a> = (&'a str, Vec<Vec<IpAddr>>);

fn parse(value: &str) -> io::Result<Vec<Named<'_>>> {
    let mut devices: Vec<Named<'_>> = Vec::new();
    let refuse = |device: &str| {
        invalid(&format!(
            "{VARIABLE}: {device:?} is not NAME, NAME=ADDRESS, or NAME=ADDRESS+ADDRESS/ADDRESS (two ports), with a \
             name that no other device has"
        ))
    };
    for device in value.split(',').filter(|_| !value.is_empty()) {
        let (name, ports) = match device.split_once('=') {
            None => (device, Vec::new()),
            Some((name, ports)) => {
                let port = |port: &str| port.split('+').map(str::parse).collect();
                let ports = ports.split('/').map(port).collect::<Result<_, _>>();
                (name, ports.map_err(|_| refuse(device))?)
            }
        };
        let is_address = name.parse::<IpAddr>().is_ok(); // a name was forgotten
        if name.is_empty() || is_address || devices.iter().any(|&(other, _)| other == name) {
            return Err(refuse(device));
        }
        devices.push((name, ports));
    }
    Ok(devices)
}

/// Makes and [registers](Device::register) a device if this machine has no RDMA device. If the environment variable
/// `IBVERBS_SOFTWARE` is set, it makes and registers the devices that it names instead, in addition to existing ones:
/// see [`Device::from_environment`]. So an empty variable means none at all.
///
/// It prints a line about each device on standard error. Keep the returned guard for as long as the devices should be
/// listed: `let _ = register_if_none()?;` drops them at once. While one guard lives, each further call returns a guard of the
/// same devices, and the last of them takes the devices away: so each test of a program has its own.
///
/// ```
/// let software = ibverbs_software::register_if_none()?;
/// let devices = ibverbs::devices()?;
/// assert!(!devices.is_empty());
/// # drop(software);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// Those of [`Device::from_environment`].
pub fn register_if_none() -> io::Result<RegisteredDevices> {
    let mut current = current();
    if let Some(devices) = current.upgrade() {
        return Ok(RegisteredDevices(devices));
    }
    let (devices, why) = match Device::from_environment()? {
        Some(devices) => (devices, "as IBVERBS_SOFTWARE says"),
        // Devices that cannot be listed cannot be used either.
        None if ibverbs::devices().is_ok_and(|devices| !devices.is_empty()) => {
            return Ok(RegisteredDevices(Arc::default()));
        }
        None => {
            let device = Device::new().map_err(|e| prefixed(&e, "no device made of software"))?;
            (vec![device], "this machine has no RDMA device")
        }
    };
    for device in &devices {
        device.register();
        crate::say(format_args!(
            "using {} at {}, made of software: {why}",
            device.name(),
            device.address()
        ));
    }
    let devices = Arc::new(devices);
    *current = Arc::downgrade(&devices);
    Ok(RegisteredDevices(devices))
}

/// The devices of the guards that live.
fn current() -> MutexGuard<'static, Weak<Vec<Device>>> {
    static CURRENT: Mutex<Weak<Vec<Device>>> = Mutex::new(Weak::new());
    CURRENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The guard of [`register_if_none`], with the devices that it registered: none if the machine has others. Guards that live at
/// the same time share the devices, and the last one that is dropped takes them away.
#[derive(Debug)]
#[must_use = "the devices are listed for as long as a guard lives"]
pub struct RegisteredDevices(Arc<Vec<Device>>);

impl Deref for RegisteredDevices {
    type Target = [Device];

    fn deref(&self) -> &[Device] {
        &self.0
    }
}

impl Drop for RegisteredDevices {
    fn drop(&mut self) {
        // A call that makes devices next finds the names and addresses of these free.
        let _current = current();
        self.0 = Arc::default();
    }
}

fn prefixed(error: &io::Error, what: &str) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::process::{Command, Output};

    use super::*;

    /// The value that a child process expects in the variable.
    const EXPECTED: &str = "IBVERBS_SOFTWARE_TEST_EXPECTED";

    #[test]
    fn the_devices_that_the_variable_names_are_made() {
        if let Ok(expected) = env::var(EXPECTED) {
            let found = Device::from_environment().map(|devices| {
                devices.map(|all| all.iter().map(Device::name).collect::<Vec<_>>().join(" "))
            });
            assert_eq!(format!("{:?}", found.map_err(|error| error.kind())), expected);
            return;
        }
        for (value, one_sided, expected) in [
            (None, "", "Ok(None)"),
            (Some(""), "0", "Ok(Some(\"\"))"),
            (Some("soft0"), "1", "Ok(Some(\"soft0\"))"),
            (Some("soft0"), "yes", "Err(InvalidInput)"),
            (Some("one,two"), "", "Ok(Some(\"one two\"))"),
            (Some("::1"), "", "Err(InvalidInput)"),
        ] {
            let mut process = Command::new(env::current_exe().unwrap());
            process.arg("environment::tests::the_devices_that_the_variable_names_are_made");
            process.env_remove(VARIABLE).envs(value.map(|value| (VARIABLE, value)));
            process.env(ONE_SIDED, one_sided).env(STRICT, one_sided).env(EXPECTED, expected);
            let output = output_of(process);
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{value:?}: {text}");
        }
    }

    fn output_of(mut process: Command) -> Output {
        let _alone = crate::link::process_starts();
        process.output().unwrap()
    }

    /// The opcodes of completions that failed: a send's and a receive's, flushed.
    fn failed_opcodes() -> Vec<u32> {
        let devices = Device::from_environment().unwrap().unwrap();
        let context = devices[0].open().unwrap();
        let queue = context.create_cq(4).unwrap();
        let domain = context.alloc_pd().unwrap();
        let kind = ibverbs::QueuePairType::ReliableConnected;
        let pair = domain.create_qp(&queue, &queue, kind).build().unwrap();
        let own = pair.endpoint();
        let mut pair = pair.handshake(own).unwrap();
        let mut memory = domain.allocate::<u8>(8).unwrap();
        pair.to_error().unwrap();
        // SAFETY: nobody touches the memory, which lives until the queue pair is destroyed.
        unsafe {
            pair.post_receive(&mut memory, .., 1).unwrap();
            pair.post_send(&memory, .., 2).unwrap();
        }
        let mut completions = [ibverbs::WorkCompletion::default(); 4];
        let found = queue.poll(&mut completions).unwrap().iter();
        found.map(|completion| completion.as_raw().opcode.0).collect()
    }

    /// Bindings that make an enum of the opcode end by a signal where it is none.
    #[test]
    fn failed_completions_have_their_opcode_unless_the_devices_are_strict() {
        const OPCODES: &str = "IBVERBS_SOFTWARE_TEST_OPCODES";
        if let Ok(expected) = env::var(OPCODES) {
            assert_eq!(format!("{:?}", failed_opcodes()), expected);
            return;
        }
        let (receive, send) =
            (crate::ffi::ibv_wc_opcode::IBV_WC_RECV.0, crate::ffi::ibv_wc_opcode::IBV_WC_SEND.0);
        let named = [receive, send];
        for (strict, expected) in
            [(None, named), (Some("0"), named), (Some(""), named), (Some("1"), [0xdead; 2])]
        {
            let test = "failed_completions_have_their_opcode_unless_the_devices_are_strict";
            let mut process = Command::new(env::current_exe().unwrap());
            process.args(["--exact", &format!("environment::tests::{test}")]);
            process.env_remove(STRICT).envs(strict.map(|strict| (STRICT, strict)));
            process.env(VARIABLE, "soft0").env(OPCODES, format!("{expected:?}"));
            let output = output_of(process);
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{strict:?}: {text}");
        }
    }

    fn named(value: &str) -> Vec<(&str, Vec<Vec<String>>)> {
        let text = |port: Vec<IpAddr>| port.iter().map(ToString::to_string).collect();
        let devices = parse(value).unwrap().into_iter();
        devices.map(|(name, ports)| (name, ports.into_iter().map(text).collect())).collect()
    }

    #[test]
    fn names_addresses_and_ports() {
        assert_eq!(named(""), []);
        assert_eq!(named("soft0,other"), [("soft0", vec![]), ("other", vec![])]);
        let strings = |port: &[&str]| port.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(
            named("a=127.0.0.5,b=192.0.2.7+2001:db8::7/::1"),
            [
                ("a", vec![strings(&["127.0.0.5"])]),
                ("b", vec![strings(&["192.0.2.7", "2001:db8::7"]), strings(&["::1"])]),
            ]
        );
    }

    #[test]
    fn what_is_no_list_of_devices_is_refused() {
        for value in [
            ",",
            "soft0,",
            "=127.0.0.5",
            "soft0=",
            "soft0=127.0.0.5+",
            "soft0=/127.0.0.5",
            "soft0=127.0.0.5:4791",
            "soft0,soft0",
            "127.0.0.5",
            "::1",
            "soft0=localhost",
        ] {
            let error = parse(value).expect_err(value);
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{value}");
            assert!(error.to_string().contains("IBVERBS_SOFTWARE"), "{error}");
        }
    }
}
