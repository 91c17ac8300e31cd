use std::panic::Location;

use super::*;

#[test]
fn a_prefix_comes_first() {
    // 2²⁴ + 1 is not an f32: the order of the sum shows.
    let own = Tensor::from_slice(&[1.0f32, f32::NAN], &[2], ddp_kernels::Device::Cpu).unwrap();
    let before: Vec<u8> = [16_777_216.0f32, 1.0]
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    let (stream, site) = (
        ddp_kernels::stream::Stream::default_of(ddp_kernels::Device::Cpu).unwrap(),
        Location::caller(),
    );
    let (operation, timeout) = (Operation::AllReduce(Reduce::Sum), Duration::from_secs(1));
    let call = Call {
        operation,
        tensor: Some(&own),
        stream: &stream,
        sequence: 0,
        timeout,
        is_followed: false,
        sum: Sum::Transport,
        group: "main",
        site,
    };
    add_before(&call, &before, &own, Reduce::Sum).unwrap();
    assert_eq!(own.to_vec::<f32>().unwrap()[0], 16_777_216.0);
    add_before(&call, &before, &own, Reduce::Max).unwrap();
    assert!(own.to_vec::<f32>().unwrap()[1].is_nan());
}
