//! Attention in both directions: its unmasked multiply-adds a second, relative to the machine's
//! peak.

use ddp_kernels::ops::{self, Attention};
use ddp_kernels::{DType, Device, Random, Result, Tensor};

use crate::machine::Machine;
use crate::{Line, against_multiply_adds};

/// Sequences and their length, with 6 heads of 64 each, causal or not.
const CASES: [(usize, usize, bool); 3] = [(8, 256, true), (8, 256, false), (2, 1024, true)];
const HEADS: usize = 6;
const HEAD_SIZE: usize = 64;

pub(crate) fn run(
    machine: &Machine,
    wanted: &dyn Fn(&str) -> bool,
    emit: &dyn Fn(Line),
) -> Result<()> {
    let mut random = Random::new(8);
    for (batch, time, causal) in CASES {
        let kind = if causal { ", causal" } else { "" };
        let names = ["attention", "attention backward"]
            .map(|direction| format!("{direction} {batch}x{time}{kind}"));
        if !names.iter().any(|name| wanted(name)) {
            continue;
        }
        let mut randn =
            |shape: &[usize]| Tensor::randn(shape, DType::F32, Device::Cpu, &mut random);
        let width = HEADS * HEAD_SIZE;
        let (qkv, dqkv) = (
            randn(&[batch * time, 3 * width])?,
            randn(&[batch * time, 3 * width])?,
        );
        let (out, dout) = (
            randn(&[batch * time, width])?,
            randn(&[batch * time, width])?,
        );
        let (lse, delta) = (
            randn(&[batch * HEADS, time])?,
            randn(&[batch * HEADS, time])?,
        );
        let attention = Attention {
            time,
            heads: HEADS,
            kv_heads: HEADS,
            head_size: HEAD_SIZE,
            causal,
            scale: None,
            window: None,
            cap: None,
        };
        let forward = || ops::attention_into(&out, &lse, &qkv, None, &attention);
        let backward = || {
            ops::attention_backward_into(&dqkv, &delta, [&dout, &out], &lse, &qkv, None, &attention)
        };
        let pairs = if causal {
            time * (time + 1) / 2
        } else {
            time * time
        };
        let bodies: [(usize, &mut dyn FnMut()); 2] = [
            (2, &mut || forward().expect("checked shapes")),
            (5, &mut || backward().expect("checked shapes")),
        ];
        for (name, (products, body)) in names.into_iter().zip(bodies) {
            let operations = 2 * products * pairs * HEAD_SIZE * HEADS * batch;
            emit(against_multiply_adds(name, operations, machine, body));
        }
    }
    Ok(())
}
