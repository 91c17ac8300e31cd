//! What CUDA devices do, real or simulated (`launch/with-simulated-gpus`): by the public API alone,
//! on every device that can be used. Without one, each test is skipped (`ddp_testing::skip`).
//!
//! Operations are compared with themselves on the CPU, which its own tests compare with plain
//! references.

mod algorithms;
mod attention;
mod chains;
mod compile;
mod copies;
mod creation;
mod elementwise;
mod embedding;
mod foreign;
mod gather;
mod graphs;
mod losses;
mod matmuls;
mod norms;
mod optimizers;
mod reductions;
mod rows;
mod streams;
mod tiles;
mod transformer;

use ddp_kernels::dtype::{bf16, f16};
use ddp_kernels::{DType, Device, Element, Random, Tensor};

/// Once a test, each of which runs on a separate thread.
fn skip(why: &str) {
    std::thread_local! {
        static SAID: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    }
    if !SAID.replace(true) {
        ddp_testing::skip(why);
    }
}

/// Every CUDA device that can be used.
pub fn devices() -> Vec<Device> {
    let devices: Vec<Device> = Device::usable()
        .into_iter()
        .filter(|device| device.is_accelerator())
        .collect();
    if devices.is_empty() {
        skip("no CUDA device");
    }
    devices
}

/// One of the devices, which take turns: enough for a test of many cases, each of which calls this.
pub fn next_device() -> Option<Device> {
    std::thread_local! {
        static CALLS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
    }
    let devices = devices();
    let call = CALLS.replace(CALLS.get() + 1);
    devices.get(call % devices.len().max(1)).copied()
}

/// Every device with every other, in both orders.
pub fn pairs() -> Vec<(Device, Device)> {
    let devices = devices();
    if devices.len() == 1 {
        skip("no second CUDA device");
    }
    let pair = |&a: &Device| {
        devices
            .iter()
            .filter(move |&&b| a != b)
            .map(move |&b| (a, b))
            .collect::<Vec<_>>()
    };
    devices.iter().flat_map(pair).collect()
}

/// Empty, one, odd, around a warp, a block and 16 bytes, and many blocks.
pub const SIZES: [usize; 14] = [
    0, 1, 3, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 4099, 20_011,
];

/// Standard normals of a seed that each test chooses for itself, with everything that is special
/// about floats at both ends, where there is room for it.
pub fn random_f32(count: usize, seed: u64) -> Vec<f32> {
    let mut values: Vec<f32> =
        Tensor::randn(&[count], DType::F32, Device::Cpu, &mut Random::new(seed))
            .unwrap()
            .to_vec()
            .unwrap();
    let mut special = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        0.0,
        -0.0,
        1e-45,
        -1e-39,
        3.4e38,
        1e5,
        -6e-8,
    ];
    // Operands of different seeds have different ones at one place.
    let turns = seed as usize % special.len();
    special.rotate_left(turns);
    if count >= 4 * special.len() {
        values[..special.len()].copy_from_slice(&special);
        values[count - special.len()..].copy_from_slice(&special);
        // Operands of all seeds have -0 here: only -0 + -0 is -0.
        values[special.len()] = -0.0;
    }
    values
}

/// The tensor's elements as bits, wherever it is; every NaN is the same, since a GPU's arithmetic
/// keeps no payload.
pub fn bits(tensor: &Tensor) -> Vec<u64> {
    fn of<T: Element>(tensor: &Tensor, bits: impl Fn(T) -> u64) -> Vec<u64> {
        let values = tensor.to_vec::<T>().unwrap();
        values
            .into_iter()
            .map(|value| {
                if value.to_f64().is_nan() {
                    u64::MAX
                } else {
                    bits(value)
                }
            })
            .collect()
    }
    match tensor.dtype() {
        DType::F32 => of::<f32>(tensor, |x| x.to_bits().into()),
        DType::BF16 => of::<bf16>(tensor, |x| x.to_bits().into()),
        DType::F16 => of::<f16>(tensor, |x| x.to_bits().into()),
        DType::F64 => of::<f64>(tensor, f64::to_bits),
        DType::U8 => of::<u8>(tensor, u64::from),
        DType::I32 => of::<i32>(tensor, |x| x.cast_unsigned().into()),
        DType::I64 => of::<i64>(tensor, i64::cast_unsigned),
    }
}

/// Asserts the same bits, NaN for NaN, and names the first element that differs.
#[track_caller]
pub fn assert_same_bits(got: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(
        (got.dtype(), got.shape().dims()),
        (expected.dtype(), expected.shape().dims()),
        "{what}: dtype and shape"
    );
    let (got_bits, expected_bits) = (bits(got), bits(expected));
    if let Some(index) = (0..got_bits.len()).find(|&index| got_bits[index] != expected_bits[index])
    {
        panic!(
            "{what} on {}: element {index} of {got} is {:#x}, on the CPU {:#x}",
            got.device(),
            got_bits[index],
            expected_bits[index]
        );
    }
}
