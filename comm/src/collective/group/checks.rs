//! What calls of a group refuse.

use ddp_kernels::error::Site;
use ddp_kernels::foreign::OPERANDS_MAX;
use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, Tensor};

use super::{Group, Pending};
use crate::collective::{Operation, REDUCIBLE, Reduce};
use crate::error::{Argument, Result};

impl Group {
    pub(super) fn check(
        &self,
        operation: Operation,
        tensor: &Tensor,
        stream: &Stream,
        at: Site,
    ) -> Result<()> {
        let refuse = |what: &str, expected: &str, got: &str, help: &str| {
            Err(Argument::error(operation, what, expected, got, help, at))
        };
        let (size, device, got) = (self.size(), tensor.device(), || tensor.to_string());
        if tensor.is_transposed() {
            let help = "call .contiguous() on it first";
            return refuse(
                "tensor",
                "rows in order",
                &format!("{tensor}, transposed"),
                help,
            );
        }
        if device != stream.device() {
            let expected = format!("a tensor on {}, the stream's device", stream.device());
            let help = "move the tensor, or use a stream of its device";
            return refuse("tensor", &expected, &got(), help);
        }
        // A rank alone moves nothing, wherever its tensors are.
        if size > 1 && self.device().unwrap_or(Device::Cpu) != device {
            let (place, help) = match self.device() {
                None => (
                    "in host memory".to_string(),
                    "move it with .to(Device::Cpu), or use a group made by World::gpu_group",
                ),
                Some(device) => (
                    format!("on {device}"),
                    "move it there, or use a group made by World::group",
                ),
            };
            let expected = format!("a tensor {place}, which group {} is for", self.name);
            return refuse("tensor", &expected, &got(), help);
        }
        self.check_operation(operation, tensor, at)
    }

    /// That `tensor`, which is where it should be, can be an operand of `operation`.
    fn check_operation(&self, operation: Operation, tensor: &Tensor, at: Site) -> Result<()> {
        let refuse = |what: &str, expected: &str, got: &str, help: &str| {
            Err(Argument::error(operation, what, expected, got, help, at))
        };
        let (size, got) = (self.size(), || tensor.to_string());
        match operation {
            Operation::AllReduce(reduce) | Operation::ReduceScatter(reduce)
                if size > 1 && self.device().is_some() && reduce != Reduce::Sum =>
            {
                let help =
                    "reduce it in host memory: .to(Device::Cpu), and a group of World::group";
                refuse("reduction", "sum, on GPUs", reduce.name(), help)
            }
            Operation::AllReduce(_) | Operation::ReduceScatter(_)
                if !REDUCIBLE.contains(&tensor.dtype()) =>
            {
                let help = "cast it with .to_dtype(…) first";
                refuse("tensor", "f32, bf16, f64 or i64", &got(), help)
            }
            Operation::ReduceScatter(_) | Operation::AllGather
                if !tensor.count().is_multiple_of(size) =>
            {
                let expected = format!("a multiple of {size} elements, one slice a rank");
                refuse("tensor", &expected, &got(), "pad it")
            }
            Operation::Broadcast { root: peer }
            | Operation::Send { to: peer }
            | Operation::Receive { from: peer }
                if peer >= size =>
            {
                let expected = format!("0 to {}", size - 1);
                refuse("rank", &expected, &peer.to_string(), "ranks count from 0")
            }
            _ if operation.peer() == Some(self.rank()) => {
                let got = format!("{}, this one", self.rank());
                let help = "use copy_from for a copy within a rank";
                refuse("rank", "another rank", &got, help)
            }
            _ => Ok(()),
        }
    }

    /// Calls that start together are on one stream, and not too many.
    pub(super) fn check_together(pending: &[Pending]) -> Result<()> {
        let refuse = |pending: &Pending, what: &str, expected: &str, got: &str| {
            let (operation, help) = (pending.operation, "start them in several groups");
            Err(Argument::error(
                operation,
                what,
                expected,
                got,
                help,
                pending.site,
            ))
        };
        let first = &pending[0].stream;
        if let Some(other) = pending.iter().find(|other| other.stream != *first) {
            return refuse(
                other,
                "stream",
                "that of the first call it starts with",
                "another",
            );
        }
        if let Some(other) = pending.get(OPERANDS_MAX) {
            let expected = format!("at most {OPERANDS_MAX} that start together");
            return refuse(other, "calls", &expected, &pending.len().to_string());
        }
        Ok(())
    }
}
