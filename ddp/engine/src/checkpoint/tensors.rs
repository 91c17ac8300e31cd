//! Tensors to and from files, piece by piece, without a second copy in memory.

use std::io::{self, Read};
use std::panic::Location;
use std::path::Path;

use ddp_kernels::dtype::{bf16, f16};
use ddp_kernels::transfer::{Phase, announced, in_phase};
use ddp_kernels::{DType, Device, Tensor};

use crate::error::{Error, Result};
use ddp_data::safetensors::{Header, TensorEntry};
use ddp_kernels::files::{self, FileDigest};

/// Elements that are converted to or from bytes at a time.
pub(crate) const PIECE: usize = 1 << 16;

/// Writes a new file: the header, then the tensors that it lists, f32 in host memory.
pub(crate) fn write_file(
    path: &Path,
    header: &Header,
    tensors: impl Iterator<Item = Result<Tensor>>,
) -> Result<FileDigest> {
    let contents = files::write_file(path, |output| {
        output.write(&header.to_bytes())?;
        // Bytes in memory must have the file's order.
        const { assert!(cfg!(target_endian = "little")) };
        for tensor in tensors {
            let write = |bytes: &[u8]| {
                let mut pieces = bytes.chunks(4 * PIECE);
                pieces.try_for_each(|piece| output.write(piece))
            };
            tensor?.with_bytes("save", Location::caller(), write)??;
        }
        Ok::<_, Error>(())
    })?;
    assert_eq!(
        contents.bytes,
        header.file_bytes(),
        "the header lists other tensors than were written"
    );
    Ok(contents)
}

/// Gives `target` the values that `read` writes, in order, one piece of rows with about `most`
/// elements after another. On the CPU in f32 they are read directly into it.
pub(super) fn read_into(
    target: &Tensor,
    why: &'static str,
    most: usize,
    mut read: impl FnMut(&mut [f32]) -> Result<()>,
) -> Result<()> {
    if target.device() == Device::Cpu && target.dtype() == DType::F32 {
        return target.with_slice_mut(read)?;
    }
    let all = target.shape().first().copied().unwrap_or(1);
    let rows = (most / (target.count() / all.max(1)).max(1)).max(1);
    for first in (0..all).step_by(rows) {
        let target = target.slice(first..all.min(first + rows))?;
        let host = Tensor::zeros(target.shape(), DType::F32, Device::Cpu)?;
        host.with_slice_mut(&mut read)??;
        let host = host.to_dtype(target.dtype())?;
        let copy = || announced(why, || target.copy_from(&host));
        in_phase(Phase::Checkpoint, copy)?;
    }
    Ok(())
}

/// The dtype of values in a file: those that f32 holds exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileDType {
    F32,
    Bf16,
    F16,
}

impl FileDType {
    /// That of a tensor in a safetensors file.
    pub(crate) fn of(entry: &TensorEntry) -> Result<FileDType, String> {
        match &*entry.dtype {
            "F32" => Ok(FileDType::F32),
            "BF16" => Ok(FileDType::Bf16),
            "F16" => Ok(FileDType::F16),
            other => Err(format!(
                "{} is {other}: expected F32, BF16 or F16; help: save it again in one of these",
                entry.name
            )),
        }
    }

    pub(crate) fn bytes(self) -> usize {
        if self == FileDType::F32 { 4 } else { 2 }
    }

    /// Reads `values` from the file's position. `bytes` is a scratch buffer.
    pub(crate) fn read(
        self,
        file: &mut impl Read,
        values: &mut [f32],
        bytes: &mut Vec<u8>,
    ) -> io::Result<()> {
        for piece in values.chunks_mut(PIECE) {
            bytes.resize(self.bytes() * piece.len(), 0);
            file.read_exact(bytes)?;
            match self {
                FileDType::F32 => fill(piece, bytes, f32::from_le_bytes),
                FileDType::Bf16 => fill(piece, bytes, |bytes| bf16::from_le_bytes(bytes).to_f32()),
                FileDType::F16 => fill(piece, bytes, |bytes| f16::from_le_bytes(bytes).to_f32()),
            }
        }
        Ok(())
    }
}

fn fill<const N: usize>(values: &mut [f32], bytes: &[u8], number: impl Fn([u8; N]) -> f32) {
    values
        .iter_mut()
        .zip(bytes.as_chunks().0)
        .for_each(|(value, bytes)| *value = number(*bytes));
}
