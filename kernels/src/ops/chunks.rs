//! Which elements of the flat arenas an optimizer works on: a table of chunks, and how threads share them.
//!
//! A table may cover a part only (under ZeRO-1: this rank's slice of every bucket). Work is counted in quanta of
//! [`QUANTUM`] elements from each chunk's start, the last of a chunk being shorter: the grid on which threads share
//! it, and on which `grad_norm_partials` sums. The grid depends on the table alone, never on the threads.
//!
//! On a GPU one launch covers all chunks, a quantum a block; what the kernels need of a table (`chunks.cu`) goes there
//! by `bring_to`, or at the first use on that device, which must not be in a capture, and stays.

use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::{Arc, Mutex, PoisonError};

use crate::cuda::launch::Kernel;
use crate::cuda::{Grid, Launcher, Source};
use crate::error::{Error, Result, Site};
use crate::ops::call::{Call, Slot};
use crate::threads::Shares;
use crate::transfer::{self, Asked};
use crate::{Device, Tensor, threads};

/// Elements of a quantum.
pub const QUANTUM: usize = 1024;

/// The kernels that go over chunks.
pub(crate) static SOURCE: Source = Source::new("chunks.cu", include_str!("chunks.cu"));
/// Threads of a block that has a quantum to itself: 16 bytes a thread.
pub(crate) const QUANTUM_THREADS: u32 = 256;

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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkTable {
    chunks: Vec<Chunk>,
    /// How many quanta come before each chunk, and at the end how many there are.
    quanta_before: Vec<usize>,
    copies: Copies,
}

/// The table as kernels read it, on each device that has asked. Clones of a table share it, since chunks never change,
/// and two tables of the same chunks are equal wherever they have been.
#[derive(Clone, Default)]
struct Copies(Arc<Mutex<Vec<Tensor>>>);

impl fmt::Debug for Copies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let copies = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        f.debug_set().entries(copies.iter().map(Tensor::device)).finish()
    }
}

impl PartialEq for Copies {
    fn eq(&self, _: &Copies) -> bool {
        true
    }
}

impl Eq for Copies {}

impl ChunkTable {
    /// Checks that the chunks are in order and do not overlap.
    #[track_caller]
    pub fn new(chunks: Vec<Chunk>) -> Result<ChunkTable> {
        let (mut end, mut quanta) = (0usize, 0usize);
        let mut quanta_before = vec![0];
        for (index, chunk) in chunks.iter().enumerate() {
            if chunk.offset < end {
                let expected = format!("at least {end}, where the chunk before it ends");
                return Err(Error::value("chunks", format!("chunks[{index}].offset"), expected, chunk.offset));
            }
            let Some(next) = chunk.offset.checked_add(chunk.len) else {
                let got = format!("{} + {}", chunk.offset, chunk.len);
                let expected = format!("at most {}", usize::MAX);
                return Err(Error::value("chunks", format!("chunks[{index}].offset + len"), expected, got));
            };
            end = next;
            // At most as many quanta as elements, and those are counted by `end`: no overflow.
            quanta += chunk.len.div_ceil(QUANTUM);
            quanta_before.push(quanta);
        }
        Ok(ChunkTable { chunks, quanta_before, copies: Copies::default() })
    }

    /// One chunk: the first `len` elements.
    pub fn whole(len: usize, decay: bool) -> ChunkTable {
        ChunkTable {
            chunks: vec![Chunk { offset: 0, len, decay }],
            quanta_before: vec![0, len.div_ceil(QUANTUM)],
            copies: Copies::default(),
        }
    }

    /// The chunks.
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// How many elements the chunks hold together.
    pub fn elements(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.len).sum()
    }

    /// How many quanta: the length of `grad_norm_partials`' output.
    pub fn quanta(&self) -> usize {
        self.quanta_before[self.chunks.len()]
    }

    /// Where the last chunk ends: the least length of a buffer that the table fits.
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

    /// The elements of these quanta, in runs as long as the chunks allow.
    fn runs_of(&self, quanta: Range<usize>) -> impl Iterator<Item = Chunk> + '_ {
        let first = self.quanta_before.partition_point(|&before| before <= quanta.start).saturating_sub(1);
        let chunks = self.chunks[first.min(self.chunks.len())..].iter().zip(&self.quanta_before[first..]);
        chunks.take_while(move |(_, before)| **before < quanta.end).map(move |(chunk, &before)| {
            let start = quanta.start.saturating_sub(before) * QUANTUM;
            let end = chunk.len.min((quanta.end - before).saturating_mul(QUANTUM));
            Chunk { offset: chunk.offset + start, len: end - start, decay: chunk.decay }
        })
    }

    /// Refuses a flat buffer that is not one-dimensional or ends before the last chunk does.
    pub(crate) fn check_fits(&self, call: &Call<'_>, buffer: Slot) -> Result<()> {
        let [len] = call.dims(buffer, "a flat buffer")?;
        if self.end() > len {
            let expected = format!("at least {} elements, where the last chunk ends", self.end());
            return Err(call.misfit(buffer, expected, "Make the chunk table for this buffer."));
        }
        Ok(())
    }

    /// Launches a kernel of `chunks.cu`, whose last four parameters are the table. There must be a quantum.
    pub(crate) fn launch(&self, gpu: &Launcher, kernel: Kernel<'_>, grid: Grid) -> Result<()> {
        assert!(self.quanta() > 0, "an empty grid cannot be launched");
        // One chunk travels in the parameters.
        let (table, chunk) = match self.chunks[..] {
            [chunk] => (None, chunk),
            _ => (Some(self.copy_on(gpu)?), Chunk { offset: 0, len: 0, decay: false }),
        };
        let entered = match &table {
            Some(table) => Some(table.enter_for("chunks", false, &gpu.queue, gpu.op, gpu.at)?),
            None => None,
        };
        kernel
            .address(entered.as_ref().map_or(0, |table| table.address()))
            .u32(u32::try_from(self.chunks.len()).expect("a table of fewer than 2³² chunks"))
            .count(chunk.offset)
            .u64(length_word(&chunk))
            .launch(grid)
    }

    /// Brings to `device`, a GPU, what kernels there need of the table: so that the first use need not. Nothing to do on the CPU.
    #[track_caller]
    pub fn bring_to(&self, device: Device) -> Result<()> {
        // One chunk travels as an argument.
        if device.is_accelerator() && self.chunks.len() > 1 {
            self.copy_to(device, "chunk table", Location::caller())?;
        }
        Ok(())
    }

    /// The table on the launcher's device, brought there at the first call.
    fn copy_on(&self, gpu: &Launcher) -> Result<Tensor> {
        self.copy_to(gpu.gpu.device(), gpu.op, gpu.at)
    }

    fn copy_to(&self, device: Device, op: &'static str, at: Site) -> Result<Tensor> {
        let mut copies = self.copies.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(copy) = copies.iter().find(|copy| copy.device() == device) {
            return Ok(copy.clone());
        }
        let befores = self.quanta_before[..self.chunks.len()].iter().map(|&before| before as u64);
        let offsets = self.chunks.iter().map(|chunk| chunk.offset as u64);
        let words = befores.chain(offsets).chain(self.chunks.iter().map(length_word)).map(u64::cast_signed);
        let words: Vec<i64> = words.collect();
        let here = Tensor::from_slice(&words, &[3, self.chunks.len()], Device::Cpu)?.named("chunk table");
        let copy = transfer::announced("the chunk table, once a device", || {
            transfer::cross(&here, device, op, Asked::Explicitly, at)
        })?;
        // Other streams may read it too: the first use on each waits for what this one was given (`memory/gpu.rs`).
        copies.push(copy.clone());
        Ok(copy)
    }

    /// Runs `body(run, parts)` over all chunks, shared among the threads: `parts` are the run's elements of `slices`.
    /// `body` must not depend on where runs are cut.
    pub(crate) fn update<T: Send, const N: usize>(
        &self,
        slices: [&mut [T]; N],
        body: impl Fn(Chunk, [&mut [T]; N]) + Sync,
    ) {
        let shares = slices.map(Shares::new);
        threads::split(self.quanta() * QUANTUM, QUANTUM, |range| {
            for run in self.runs_of(range.start / QUANTUM..range.end / QUANTUM) {
                // SAFETY: `split` gives every quantum to one thread, once, and quanta do not overlap, because
                // chunks do not: `new` checked it, and nothing changes a table.
                let parts = shares.each_ref().map(|share| unsafe { share.part(run.range()) });
                body(run, parts);
            }
        });
    }

    /// `out[i] = make(piece i)` for every quantum, shared among the threads.
    pub(crate) fn each_quantum<U: Send>(&self, out: &mut [U], make: impl Fn(Chunk) -> U + Sync) {
        assert_eq!(out.len(), self.quanta());
        let shares = Shares::new(out);
        threads::split(self.quanta() * QUANTUM, QUANTUM, |range| {
            let quanta = range.start / QUANTUM..range.end / QUANTUM;
            // SAFETY: `split` hands out ranges that do not overlap, and so are those divided by the grain.
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
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn table(parts: &[(usize, usize)]) -> ChunkTable {
        let mut offset = 0;
        let chunk = |&(gap, len): &(usize, usize)| {
            let chunk = Chunk { offset: offset + gap, len, decay: len % 2 == 0 };
            offset += gap + len;
            chunk
        };
        ChunkTable::new(parts.iter().map(chunk).collect()).unwrap()
    }

    proptest! {
        #[test]
        fn quanta_cover_every_chunk_once_in_order_however_they_are_cut(
            parts in prop::collection::vec((0usize..50, 0usize..5000), 0..8), cuts in 1usize..9,
        ) {
            let table = table(&parts);
            let pieces: Vec<Chunk> = table.pieces().collect();
            prop_assert_eq!(pieces.len(), table.quanta());
            let covered: Vec<usize> = pieces.iter().flat_map(Chunk::range).collect();
            let wanted: Vec<usize> = table.chunks().iter().flat_map(Chunk::range).collect();
            prop_assert_eq!(&covered, &wanted);
            prop_assert_eq!(covered.len(), table.elements());
            let runs = (0..cuts).map(|index| threads::cut(table.quanta(), 1, cuts, index));
            let again: Vec<usize> = runs.flat_map(|quanta| table.runs_of(quanta)).flat_map(|run| run.range()).collect();
            prop_assert_eq!(&again, &wanted);
            for piece in pieces {
                let home = table.chunks().iter().find(|chunk| chunk.range().contains(&piece.offset)).unwrap();
                prop_assert_eq!((piece.offset - home.offset) % QUANTUM, 0);
                prop_assert!(piece.range().end == home.range().end || piece.len == QUANTUM);
                prop_assert_eq!(piece.decay, home.decay);
            }
        }
    }

    #[test]
    fn an_update_visits_each_element_once_and_leaves_the_gaps() {
        let table = table(&[(3, 40_000), (7, 0), (0, 1), (1000, 70_001)]);
        let (mut a, mut b) = (vec![0u8; table.end() + 5], vec![0u8; table.end() + 5]);
        table.update([&mut a, &mut b], |run, parts| {
            for part in parts {
                assert_eq!(part.len(), run.len);
                part.iter_mut().for_each(|count| *count += 1);
            }
        });
        for (index, (&a, &b)) in a.iter().zip(&b).enumerate() {
            let inside = table.chunks().iter().any(|chunk| chunk.range().contains(&index));
            assert_eq!((a, b), (u8::from(inside), u8::from(inside)), "{index}");
        }
    }

    #[test]
    fn chunks_that_overlap_or_overflow_are_refused_by_index() {
        let chunk = |offset, len| Chunk { offset, len, decay: false };
        let error = ChunkTable::new(vec![chunk(0, 10), chunk(9, 1)]).unwrap_err().to_string();
        assert!(error.contains("chunks[1].offset: expected at least 10"), "{error}");
        let error = ChunkTable::new(vec![chunk(5, usize::MAX)]).unwrap_err().to_string();
        assert!(error.contains("chunks[0].offset + len: expected at most 18446744073709551615, got 5 + "), "{error}");
        assert_eq!(ChunkTable::new(Vec::new()).unwrap().quanta(), 0);
        assert_eq!(ChunkTable::whole(2049, true).quanta(), 3);
    }
}
