use std::ptr;

use super::matches::HeaderMatch;
use crate::base::{Error, Handle, Result, debug, ffi, object, resource, setters};
use crate::verbs::device::{Context, ContextRef};

object!(ibv_flow_action, ibv_destroy_flow_action);

const CREATE: &str = "ibv_create_flow_action_esp";
const MODIFY: &str = "ibv_modify_flow_action_esp";

bitflags::bitflags! {
    /// `enum ibv_flow_action_esp_flags`: how to process packets. Without flags, the device decrypts what it receives,
    /// in tunnel mode, and leaves the headers to the program.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct EspFlags: u32 {
        /// The device adds and removes the headers too.
        const FULL_OFFLOAD = ffi::ib_uverbs_flow_action_esp_flags::IB_UVERBS_FLOW_ACTION_ESP_FLAGS_FULL_OFFLOAD.0;
        /// Transport mode.
        const TRANSPORT = ffi::ib_uverbs_flow_action_esp_flags::IB_UVERBS_FLOW_ACTION_ESP_FLAGS_TRANSPORT.0;
        /// The device encrypts.
        const ENCRYPT = ffi::ib_uverbs_flow_action_esp_flags::IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ENCRYPT.0;
        /// The extended sequence number has entered a new window.
        const NEW_WINDOW = ffi::ib_uverbs_flow_action_esp_flags::IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ESN_NEW_WINDOW.0;
    }
}

/// Keys and settings of an [`EspAction`]: AES-GCM, with a sequential initialisation vector.
#[derive(Clone)]
#[doc(alias = "ibv_flow_action_esp_attr")]
#[must_use = "it is for an action"]
pub struct EspParameters {
    keys: ffi::ib_uverbs_flow_action_esp_keymat_aes_gcm,
    settings: ffi::ib_uverbs_flow_action_esp,
    replay_window: Option<u32>,
    sequence_high: Option<u32>,
    /// Type and aligned bytes of the outer header.
    encapsulation: Option<(ffi::ibv_flow_spec_type, u16, Vec<u64>)>,
}

impl EspParameters {
    /// Key (16, 24 or 32 bytes), salt and initialisation vector of AES-GCM.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the key has another length.
    pub fn aes_gcm(key: &[u8], salt: u32, initialisation_vector: u64) -> Result<Self> {
        let reason = "a key of AES-GCM has 16, 24 or 32 bytes";
        Error::invalid_if(!matches!(key.len(), 16 | 24 | 32), CREATE, reason)?;
        let mut keys = ffi::ib_uverbs_flow_action_esp_keymat_aes_gcm {
            iv: initialisation_vector,
            iv_algo: ffi::ib_uverbs_flow_action_esp_keymat_aes_gcm_iv_algo::IB_UVERBS_FLOW_ACTION_IV_ALGO_SEQ.0,
            salt,
            icv_len: 16,
            key_len: key.len() as u32,
            ..Default::default()
        };
        let (words, _) = key.as_chunks::<4>();
        for (to, word) in keys.aes_key.iter_mut().zip(words) {
            *to = u32::from_ne_bytes(*word);
        }
        let settings = ffi::ib_uverbs_flow_action_esp::default();
        Ok(Self { keys, settings, replay_window: None, sequence_high: None, encapsulation: None })
    }

    /// The bytes of the integrity check value: 8, 12 or 16 (16 unless set).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: another length.
    pub fn integrity_length(mut self, length: u32) -> Result<Self> {
        let reason = "an integrity check value has 8, 12 or 16 bytes";
        Error::invalid_if(!matches!(length, 8 | 12 | 16), CREATE, reason)?;
        self.keys.icv_len = length;
        Ok(self)
    }

    setters! { self,
        /// The security parameters index (0 unless set).
        security_parameters_index(index: u32) => self.settings.spi = index;

        /// The sequence number of the next packet (0 unless set).
        sequence_number(number: u32) => self.settings.seq = number;

        /// The bytes to which traffic flow confidentiality pads packets (0, no padding, unless set).
        padding(length: u32) => self.settings.tfc_pad = length;

        /// After how many packets the action stops (0, never, unless set).
        packet_limit(packets: u64) => self.settings.hard_limit_pkts = packets;

        /// How to process packets (no flags unless set).
        flags(flags: EspFlags) => self.settings.flags = flags.bits();

        /// Drops packets that arrive again, in a window of that many packets (not unless set).
        replay_window(packets: u32) => self.replay_window = Some(packets);

        /// The upper half of an extended sequence number (none unless set).
        extended_sequence_number(upper: u32) => self.sequence_high = Some(upper);
    }

    /// The outer header of tunnel mode, which the device adds with [`FULL_OFFLOAD`](EspFlags::FULL_OFFLOAD) (none
    /// unless set).
    pub fn encapsulation(mut self, header: impl HeaderMatch) -> Self {
        let (kind, bytes) = header.value(); // no longer than 36 bytes
        let mut words = vec![0_u64; bytes.len().div_ceil(8)];
        for (to, chunk) in words.iter_mut().zip(bytes.chunks(8)) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            *to = u64::from_ne_bytes(word);
        }
        self.encapsulation = Some((kind, bytes.len() as u16, words));
        self
    }

    fn with_raw<T>(&self, verb: impl FnOnce(*mut ffi::ibv_flow_action_esp_attr) -> T) -> T {
        let (mut keys, mut settings) = (self.keys, self.settings);
        let mut window = ffi::ib_uverbs_flow_action_esp_replay_bmp::default();
        let mut outer = ffi::ib_uverbs_flow_action_esp_encap::default();
        let mut raw = ffi::ibv_flow_action_esp_attr {
            esp_attr: &mut settings,
            keymat_proto:
                ffi::ib_uverbs_flow_action_esp_keymat::IB_UVERBS_FLOW_ACTION_ESP_KEYMAT_AES_GCM,
            keymat_len: size_of_val(&keys) as u16,
            keymat_ptr: ptr::from_mut(&mut keys).cast(),
            ..Default::default()
        };
        if let Some(size) = self.replay_window {
            window.size = size;
            raw.replay_proto =
                ffi::ib_uverbs_flow_action_esp_replay::IB_UVERBS_FLOW_ACTION_ESP_REPLAY_BMP;
            raw.replay_len = size_of_val(&window) as u16;
            raw.replay_ptr = ptr::from_mut(&mut window).cast();
        }
        if let Some(upper) = self.sequence_high {
            raw.esn = upper;
            raw.comp_mask = ffi::ibv_flow_action_esp_mask::IBV_FLOW_ACTION_ESP_MASK_ESN.0;
        }
        if let Some((kind, length, words)) = &self.encapsulation {
            outer.__bindgen_anon_1.val_ptr = words.as_ptr().cast_mut().cast();
            outer.len = *length;
            // Header types are below 0x1004.
            outer.type_ = kind.0 as u16;
            raw.esp_encap = &mut outer;
        }
        verb(&mut raw)
    }
}

// Without the key.
debug! { EspParameters, self, settings: self.settings, replay_window: self.replay_window, .. }

/// `struct ibv_flow_action`: encrypts or decrypts the IPsec packets (ESP) of flows whose [rule names
/// it](crate::flow::Rule::action).
#[doc(alias = "ibv_flow_action")]
pub struct EspAction<'ctx> {
    raw: Handle<ffi::ibv_flow_action>,
    context: ContextRef<'ctx>,
}

resource! {
    /// `ibv_destroy_flow_action`: destroys the action and reports a failure, which a drop ignores.
    ///
    /// # Errors
    ///
    /// The action is then [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with its context.
    ///
    ///  - `EBUSY`: a flow still uses it.
    #[doc(alias = "ibv_destroy_flow_action")]
    EspAction<'ctx>: raw of ibv_flow_action, context
}

impl<'ctx> EspAction<'ctx> {
    /// `ibv_create_flow_action_esp`: creates an action.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device cannot encrypt, or not so.
    ///  - `EINVAL`: the device does not support a setting.
    ///  - `ENOMEM`: the device has none left.
    #[doc(alias = "ibv_create_flow_action_esp")]
    pub fn new(context: impl Into<ContextRef<'ctx>>, parameters: &EspParameters) -> Result<Self> {
        let context = context.into();
        let raw = parameters.with_raw(|attributes| {
            // SAFETY: the context is live, the struct and its pointers are valid during the call; the action is
            // ours alone.
            unsafe {
                let raw = ffi::ibv_create_flow_action_esp(context.as_raw(), attributes);
                Handle::new(CREATE, raw)
            }
        })?;
        Ok(Self { raw, context })
    }

    /// `ibv_modify_flow_action_esp`: changes keys and settings.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device cannot change an action, or not this setting.
    ///  - `EINVAL`: the device does not support a setting.
    #[doc(alias = "ibv_modify_flow_action_esp")]
    pub fn modify(&mut self, parameters: &EspParameters) -> Result<()> {
        // SAFETY: the action is live, the struct and its pointers are valid during the call.
        let returned = parameters.with_raw(|attributes| unsafe {
            ffi::ibv_modify_flow_action_esp(self.as_raw(), attributes)
        });
        ffi::status(MODIFY, returned)
    }

    /// The context that it was created on.
    pub fn context(&self) -> &Context<'ctx> {
        &self.context
    }
}

debug! { EspAction<'_>, self, device: self.context.name(), .. }
