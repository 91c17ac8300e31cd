//! Which elements of the flat buffers an optimizer works on: a table of chunks, and how threads
//! share them.
//!
//! A table may cover only a part (under ZeRO-1: this rank's slice of every bucket). Work is counted
//! in quanta of [`QUANTUM`] elements from the start of each chunk, whose last quantum may be
//! shorter. Threads share quanta, and `grad_norm_partials` sums by quantum. Quanta depend on the
//! table alone, never on the number of threads.
//!
//! On a GPU one launch covers all chunks, with a block for each quantum. Kernels read the table
//! from device memory. `bring_to` copies it there, or else the first use, which must not be
//! captured.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::error::{Caller, Error, Result};
use crate::launch::{BLOCK_THREADS, CuFile, GpuLaunch, Grid, KernelArgument, PARAMETERS_MAX};
use crate::ops::call::{OpCall, Slot};
use crate::panics::lock;
use crate::threads::Shares;
use crate::transfer::{self, Asked};
use crate::{Device, Tensor, threads};

/// Elements of a quantum.
pub const QUANTUM: usize = 1024;

/// Threads of a block with a quantum: 16 bytes each.
pub(crate) const QUANTUM_THREADS: usize = 256;

/// A range of a flat buffer, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Where it starts.
    pub offset: usize,
    /// How many elements.
    pub len: usize,
    /// Whether weight decay applies to it.
    pub decay: bool,
}

impl Chunk {
    /// Its elements' indices in the buffer.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset.saturating_add(self.len)
    }
}

/// Chunks in ascending order that do not overlap.
#[derive(Clone, Debug)]
pub struct ChunkTable {
    chunks: Vec<Chunk>,
    /// The number of quanta before each chunk, and last the number of all quanta.
    quanta_before: Vec<usize>,
    /// The table as kernels read it, on each device where it was used. Clones share it.
    copies: Arc<Mutex<Vec<Tensor>>>,
}

impl ChunkTable {
    /// Checks that the chunks are in order and do not overlap.
    #[track_caller]
    pub fn new(chunks: Vec<Chunk>) -> Result<ChunkTable> {
        let (mut end, mut quanta) = (0usize, 0usize);
        let mut quanta_before = vec![0];
        for (index, chunk) in chunks.iter().enumerate() {
            if chunk.offset < end {
                let what = format!("chunks[{index}].offset");
                let expected = format!("at least {end}, where the chunk before it ends");
                return Err(Error::value("chunks", what, expected, chunk.offset));
            }
            let Some(next) = chunk.offset.checked_add(chunk.len) else {
                let what = format!("chunks[{index}].offset + len");
                let got = format!("{} + {}", chunk.offset, chunk.len);
                let expected = format!("at most {}", usize::MAX);
                return Err(Error::value("chunks", what, expected, got));
            };
            end = next;
            // No overflow: there are no more quanta than elements, which `end` counts.
            quanta += chunk.len.div_ceil(QUANTUM);
            quanta_before.push(quanta);
        }
        Ok(ChunkTable {
            chunks,
            quanta_before,
            copies: Arc::default(),
        })
    }

    /// One chunk that decays: the first `len` elements.
    pub fn whole(len: usize) -> ChunkTable {
        let chunk = Chunk {
            offset: 0,
            len,
            decay: true,
        };
        ChunkTable::new(vec![chunk]).expect("one chunk is in order")
    }

    /// The same chunks, none of which decays.
    pub fn without_decay(mut self) -> ChunkTable {
        self.chunks.iter_mut().for_each(|chunk| chunk.decay = false);
        self.copies = Arc::default();
        self
    }

    /// The chunks.
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// How many elements the chunks hold in total.
    pub fn elements(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.len).sum()
    }

    /// How many quanta: the length of `grad_norm_partials`' output.
    pub fn quanta(&self) -> usize {
        self.quanta_before[self.chunks.len()]
    }

    /// Where the last chunk ends: the smallest length of a buffer that the table fits.
    pub fn end(&self) -> usize {
        self.chunks.last().map_or(0, |chunk| chunk.range().end)
    }

    /// The quanta in order, each a piece of one chunk.
    pub fn pieces(&self) -> impl Iterator<Item = Chunk> + '_ {
        self.pieces_of(0..self.quanta())
    }

    fn pieces_of(&self, quanta: Range<usize>) -> impl Iterator<Item = Chunk> + '_ {
        self.runs_of(quanta).flat_map(|run| {
            let piece = move |start: usize| Chunk {
                offset: run.offset + start,
                len: QUANTUM.min(run.len - start),
                decay: run.decay,
            };
            (0..run.len).step_by(QUANTUM).map(piece)
        })
    }

    /// The elements of these quanta, in runs that are as long as the chunks allow.
    fn runs_of(&self, quanta: Range<usize>) -> impl Iterator<Item = Chunk> + '_ {
        let first = self
            .quanta_before
            .partition_point(|&before| before <= quanta.start)
            .saturating_sub(1);
        let chunks = self.chunks[first.min(self.chunks.len())..]
            .iter()
            .zip(&self.quanta_before[first..]);
        chunks
            .take_while(move |(_, before)| **before < quanta.end)
            .map(move |(chunk, &before)| {
                let start = quanta.start.saturating_sub(before) * QUANTUM;
                let end = chunk.len.min((quanta.end - before).saturating_mul(QUANTUM));
                Chunk {
                    offset: chunk.offset + start,
                    len: end - start,
                    decay: chunk.decay,
                }
            })
    }

    /// Refuses a buffer that is not one-dimensional or ends before the last chunk.
    pub(crate) fn check_fits(&self, call: &OpCall<'_>, buffer: Slot) -> Result<()> {
        let [len] = call.dims(buffer, "a flat buffer")?;
        if self.end() > len {
            let expected = format!(
                "at least {} elements, where the last chunk ends",
                self.end()
            );
            let help = "make the chunk table for this buffer";
            return Err(call.operand_error(buffer, expected, help));
        }
        Ok(())
    }

    /// Launches a kernel whose parameters are `args` and then the four of the table (`piece_of` in
    /// chunks.cuh), with this many threads for each quantum. Each thread makes this many loads, one
    /// after another.
    pub(crate) fn launch(
        &self,
        gpu: &GpuLaunch,
        source: &'static CuFile,
        name: &'static str,
        (threads, loads): (usize, usize),
        args: &[u64],
    ) -> Result<()> {
        if self.quanta() == 0 {
            return Ok(());
        }
        // A single chunk is passed in the parameters, without a table.
        let (table, chunk) = match self.chunks[..] {
            [chunk] => (None, Some(chunk)),
            _ => (Some(self.copy_to(gpu.gpu.device(), gpu.by)?), None),
        };
        let entered = match &table {
            Some(table) => Some(table.enter_for("chunks", false, &gpu.queue, gpu.by)?),
            None => None,
        };
        let chunks = u32::try_from(self.chunks.len()).expect("a table of fewer than 2³² chunks");
        let mut words = [0; PARAMETERS_MAX];
        let (given, table) = words[..args.len() + 4].split_at_mut(args.len());
        given.copy_from_slice(args);
        table.copy_from_slice(&[
            entered.map_or(0, |table| table.address()),
            chunks.word(),
            chunk.map_or(0, |chunk| chunk.offset as u64),
            chunk.map_or(0, |chunk| length_word(&chunk)),
        ]);
        let blocks = (self.quanta() * threads).div_ceil(BLOCK_THREADS as usize);
        // The chunk of a quantum is found by halving.
        let search = chunks.next_power_of_two().ilog2() + u32::from(chunks > 1);
        let grid = Grid::blocks(blocks, BLOCK_THREADS, loads + search as usize);
        gpu.launch(source, name, grid, &words[..args.len() + 4])
    }

    /// Copies the table to `device` for kernels there, so that their first launch need not. Does
    /// nothing for the CPU.
    #[track_caller]
    pub fn bring_to(&self, device: Device) -> Result<()> {
        if device.is_accelerator() && self.chunks.len() > 1 {
            self.copy_to(device, Caller::new("chunk table"))?;
        }
        Ok(())
    }

    fn copy_to(&self, device: Device, by: Caller) -> Result<Tensor> {
        let mut copies = lock(&self.copies);
        if let Some(copy) = copies.iter().find(|copy| copy.device() == device) {
            return Ok(copy.clone());
        }
        let befores = self.quanta_before[..self.chunks.len()].iter();
        let offsets = self.chunks.iter().map(|chunk| chunk.offset as u64);
        let words = (befores.map(|&before| before as u64))
            .chain(offsets)
            .chain(self.chunks.iter().map(length_word));
        let words: Vec<i64> = words.map(u64::cast_signed).collect();
        let here =
            Tensor::from_slice(&words, &[3, self.chunks.len()], Device::Cpu)?.named("chunk table");
        let copy = transfer::announced("the chunk table, once a device", || {
            transfer::cross(&here, device, Asked::Explicitly, by)
        })?;
        // Other streams may read it too: their first use waits for this stream (`memory/gpu.rs`).
        copies.push(copy.clone());
        Ok(copy)
    }

    /// Runs `body(run, parts)` over all chunks, split over the threads; `parts` are the elements of
    /// the run in each of `slices`. The result must not depend on where runs are split. Whether
    /// `body` says of all runs that all is well.
    pub(crate) fn update<T: Send, const N: usize>(
        &self,
        slices: [&mut [T]; N],
        body: impl Fn(Chunk, [&mut [T]; N]) -> bool + Sync,
    ) -> bool {
        let (shares, all) = (slices.map(Shares::new), AtomicBool::new(true));
        threads::split(self.quanta() * QUANTUM, QUANTUM, |range| {
            for run in self.runs_of(range.start / QUANTUM..range.end / QUANTUM) {
                // SAFETY: `split` gives every quantum to one thread, once. Quanta do not overlap
                // because chunks do not: `new` checked that, and a table never changes.
                let parts = shares
                    .each_ref()
                    .map(|share| unsafe { share.part(run.range()) });
                if !body(run, parts) {
                    all.store(false, Ordering::Relaxed);
                }
            }
        });
        all.into_inner()
    }

    /// `out[i] = make(piece i)` for every quantum, split over the threads.
    pub(crate) fn each_quantum<U: Send>(&self, out: &mut [U], make: impl Fn(Chunk) -> U + Sync) {
        assert_eq!(out.len(), self.quanta());
        let shares = Shares::new(out);
        threads::split(self.quanta() * QUANTUM, QUANTUM, |range| {
            let quanta = range.start / QUANTUM..range.end / QUANTUM;
            // SAFETY: `split` hands out ranges that do not overlap; divided by the grain, they
            // still do not.
            let out = unsafe { shares.part(quanta.clone()) };
            for (out, piece) in out.iter_mut().zip(self.pieces_of(quanta)) {
                *out = make(piece);
            }
        });
    }
}

/// A chunk's length and decay in one word.
fn length_word(chunk: &Chunk) -> u64 {
    2 * chunk.len as u64 + u64::from(chunk.decay)
}

#[cfg(test)]
mod tests;
