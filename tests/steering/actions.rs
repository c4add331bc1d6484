//! Actions: encryption and decryption of IPsec.

use ibverbs::flow::{EspAction, EspFlags, EspMatch, EspParameters, Ipv4Match, Rule};
use std::sync::Arc;

use ibverbs::ffi;

use super::*;

#[test]
fn every_parameter_reaches_the_provider() {
    let device = FunctionDevice::model();
    let context = device.context();
    let key: [u8; 32] = std::array::from_fn(|at| at as u8);
    let parameters = EspParameters::aes_gcm(&key, 0x5a17, 0x1234_5678_9abc).unwrap();
    let mut action = EspAction::new(&context, &parameters).unwrap();
    let esp = device.last_call("create_flow_action_esp").unwrap().esp;
    assert!(esp.has_attr && esp.has_keymat && !esp.has_replay);
    assert_eq!((esp.spi, esp.seq, esp.tfc_pad, esp.flags, esp.hard_limit_pkts), (0, 0, 0, 0, 0));
    assert_eq!((esp.keymat_proto, esp.iv, esp.iv_algo), (0, 0x1234_5678_9abc, 0));
    assert_eq!((esp.salt, esp.icv_len, esp.key_len), (0x5a17, 16, 32));
    let bytes: Vec<u8> = esp.aes_key.iter().flat_map(|word| word.to_ne_bytes()).collect();
    assert_eq!(bytes, key);
    assert_eq!((esp.comp_mask, esp.encap_type, esp.replay_len), (0, 0, 0));

    let outer = Ipv4Match::new().source([10, 0, 0, 1].into()).destination([10, 0, 0, 2].into());
    let parameters = EspParameters::aes_gcm(&key[..16], 1, 2)
        .unwrap()
        .integrity_length(12)
        .unwrap()
        .security_parameters_index(3)
        .sequence_number(4)
        .padding(5)
        .packet_limit(6 << 40)
        .flags(EspFlags::ENCRYPT | EspFlags::FULL_OFFLOAD)
        .replay_window(64)
        .extended_sequence_number(7)
        .encapsulation(outer);
    action.modify(&parameters).unwrap();
    let call = device.last_call("modify_flow_action_esp").unwrap();
    assert_eq!(call.object, action.as_raw().cast_const().cast());
    let esp = call.esp;
    assert_eq!(
        (esp.spi, esp.seq, esp.tfc_pad, esp.flags, esp.hard_limit_pkts),
        (3, 4, 5, 5, 6 << 40)
    );
    assert_eq!((esp.salt, esp.iv, esp.icv_len, esp.key_len), (1, 2, 12, 16));
    assert_eq!(esp.aes_key[4..], [0; 4], "no bytes but those of the key");
    assert_eq!((esp.has_replay, esp.replay_proto, esp.replay_size), (true, 1, 64));
    assert_eq!((esp.comp_mask, esp.esn), (1, 7));
    let ipv4 = ffi::ibv_flow_spec_type::IBV_FLOW_SPEC_IPV4_EXT.0;
    assert_eq!((esp.encap_type, esp.encap_len, esp.encap_next), (ipv4, 12, false));
    assert_eq!(esp.encap[..8], [10, 0, 0, 1, 10, 0, 0, 2]);
    assert!(!format!("{parameters:?}").contains("aes_key"), "{parameters:?}");

    device.fail("modify_flow_action_esp").errno(libc::EOPNOTSUPP).times(1);
    assert_eq!(action.modify(&parameters).unwrap_err().kind(), ErrorKind::Unsupported);
    action.close().unwrap();
    device.fail("create_flow_action_esp").errno(libc::ENOMEM).times(1);
    assert_eq!(EspAction::new(&context, &parameters).unwrap_err().kind(), ErrorKind::Resource);
}

#[test]
fn bad_parameters_are_refused() {
    for length in [0, 15, 33] {
        let error = EspParameters::aes_gcm(&vec![1; length], 0, 0).unwrap_err();
        assert!(error.to_string().contains("16, 24 or 32 bytes"), "{error}");
    }
    let parameters = EspParameters::aes_gcm(&[1; 24], 0, 0).unwrap();
    let error = parameters.integrity_length(10).unwrap_err();
    assert!(error.to_string().contains("8, 12 or 16 bytes"), "{error}");
}

#[test]
fn a_flow_keeps_its_action() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let parameters = EspParameters::aes_gcm(&[1; 16], 0, 0).unwrap();
    let action = Arc::new(EspAction::new(&context, &parameters).unwrap());
    let mut pair = raw_packets(&domain, &queue);
    let rule = Rule::new(1).matching(EspMatch::new().security_parameters_index(3)).action(&action);
    let flow = pair.create_flow(&rule).unwrap();
    let call = device.last_call("create_flow").unwrap();
    let esp = size_of::<ffi::ibv_flow_spec_esp>();
    let handle = ffi::ibv_flow_spec_type::IBV_FLOW_SPEC_ACTION_HANDLE.0;
    assert_eq!(call.flow_specs[esp..esp + 4], handle.to_ne_bytes());
    let pointer = (action.as_raw() as usize).to_ne_bytes();
    assert_eq!(call.flow_specs[esp + 8..esp + 16], pointer);
    drop((rule, action));
    assert_eq!(device.live(Kind::FlowAction), 1);
    pair.destroy_flow(flow).unwrap();
    assert_eq!(device.live(Kind::FlowAction), 0);
}
