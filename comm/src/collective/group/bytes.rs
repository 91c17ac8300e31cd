//! Short byte strings between ranks: gathering them, broadcasting them, and agreeing on the outcome
//! of work that every rank did for itself.

use std::panic::Location;

use ddp_kernels::error::Site;
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};

use super::Group;
use crate::collective::Operation;
use crate::error::{Argument, RemoteError, Result};

/// The most bytes that one call brings to a rank: these calls are for messages, not for tensors.
const BYTES_MAX: usize = 4 << 30;

/// The first byte of a shared outcome.
const SUCCEEDED: u8 = 0;
const FAILED: u8 = 1;

impl Group {
    /// Every rank's bytes, in rank order. Lengths may differ. The host waits for all ranks,
    /// whatever the group is for.
    #[track_caller]
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (size, rank, at) = (self.size(), self.rank(), Location::caller());
        let mut lengths = vec![0i64; size];
        lengths[rank] = bytes.len() as i64;
        let lengths = Tensor::from_slice(&lengths, &[size], Device::Cpu)?.named("lengths");
        self.gather_on_host(&lengths, at)?;
        let lengths = lengths.to_vec::<i64>()?;
        let lengths = checked_lengths("all_gather_bytes", &lengths, BYTES_MAX / size, at)?;
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if longest == 0 {
            return Ok(vec![Vec::new(); size]);
        }
        let all = Tensor::zeros(&[size, longest], DType::U8, Device::Cpu)?.named("bytes");
        all.with_slice_mut::<u8, _>(|all| {
            all[rank * longest..][..bytes.len()].copy_from_slice(bytes)
        })?;
        self.gather_on_host(&all, at)?;
        let all = all.to_vec::<u8>()?;
        let slices = all.chunks(longest).zip(lengths);
        Ok(slices
            .map(|(slice, length)| slice[..length].to_vec())
            .collect())
    }

    /// As `all_gather`, of a tensor in host memory, also if the group is for GPUs.
    fn gather_on_host(&self, tensor: &Tensor, at: Site) -> Result<()> {
        let stream = Stream::default_of(Device::Cpu)?;
        if self.device().is_none() {
            return self.run(Operation::AllGather, tensor, &stream, at);
        }
        self.run_on_host(&self.number(Operation::AllGather, Some(tensor), &stream, at))
    }

    /// Copies rank `root`'s `bytes` to every rank. For groups in host memory.
    #[track_caller]
    pub fn broadcast_bytes(&self, bytes: &mut Vec<u8>, root: usize) -> Result<()> {
        let (stream, at) = (Stream::default_of(Device::Cpu)?, Location::caller());
        let length = Tensor::scalar(bytes.len() as i64, Device::Cpu)?.named("length");
        self.broadcast(&length, root, &stream)?;
        let length = length.to_vec::<i64>()?;
        let length = checked_lengths("broadcast_bytes", &length, BYTES_MAX, at)?[0];
        if length == 0 {
            bytes.clear();
            return Ok(());
        }
        bytes.resize(length, 0);
        let all = Tensor::from_slice(&bytes[..], &[length], Device::Cpu)?.named("bytes");
        self.broadcast(&all, root, &stream)?;
        *bytes = all.to_vec::<u8>()?;
        Ok(())
    }

    /// Shares the outcome of work that every rank did for itself: bytes, or an exit code and the
    /// text of an error.
    ///
    /// If all ranks succeeded, every rank gets the bytes of all, in rank order. Otherwise every
    /// rank gets the error of the lowest rank that failed; that rank may return its own typed error
    /// instead.
    #[track_caller]
    pub fn share_outcome(
        &self,
        outcome: Result<&[u8], (u8, String)>,
    ) -> Result<Result<Vec<Vec<u8>>, RemoteError>> {
        let message = match outcome {
            Ok(bytes) => [&[SUCCEEDED], bytes].concat(),
            Err((exit_code, text)) => [&[FAILED, exit_code], text.as_bytes()].concat(),
        };
        let mut all = self.all_gather_bytes(&message)?;
        let failed = all
            .iter()
            .enumerate()
            .find_map(|(rank, message)| match &message[..] {
                [FAILED, exit_code, text @ ..] => Some(RemoteError {
                    rank,
                    exit_code: *exit_code,
                    text: String::from_utf8_lossy(text).into_owned(),
                }),
                _ => None,
            });
        if let Some(error) = failed {
            return Ok(Err(error));
        }
        all.iter_mut().for_each(|message| {
            message.drain(..message.len().min(1));
        });
        Ok(Ok(all))
    }
}

/// Lengths that other ranks sent, checked before memory is allocated by them.
fn checked_lengths(
    operation: &str,
    lengths: &[i64],
    bytes_max: usize,
    at: Site,
) -> Result<Vec<usize>> {
    let checked = |(index, &length): (usize, &i64)| match usize::try_from(length) {
        Ok(length) if length <= bytes_max => Ok(length),
        _ => {
            let what = match lengths.len() {
                1 => "bytes of the root".into(),
                _ => format!("bytes of rank {index}"),
            };
            let expected = format!("at most {bytes_max} bytes");
            let help = "move large data as a tensor, with a group";
            Err(Argument::error(operation, what, expected, length, help, at))
        }
    };
    lengths.iter().enumerate().map(checked).collect()
}

#[cfg(test)]
mod tests;
