//! add_in_order: partial sums of several ranks become their sum, added in the order of a tree. Each
//! is read once. Letters: E elements, O parts that others gave, G that this rank gives.

use crate::error::Result;
use crate::launch::{Grid, Source, args};
use crate::ops::call::{Call, FLOATS_AND_BF16, with_float};
use crate::ops::loops::GRAIN;
use crate::{Device, Tensor, threads};

static SOURCE: Source = Source::new("add_in_order.cu", include_str!("add_in_order.cu"));
/// The most sums that are left at a time: of 2¹⁰ shards.
const DEPTH: usize = 10;

/// Where a part is, in the lowest bits of its word: what another gave, one of the rows, or the last
/// of this rank, which the sum replaces.
const OTHER: i32 = 0;
const ROW: i32 = 1;
const OUT: i32 = 2;

/// In what order partial sums are added, on one device.
#[derive(Clone, Debug)]
pub struct AddOrder {
    /// (O + G): where each part is, and four times the number of additions that follow it.
    words: Vec<i32>,
    /// i32 (O + G): the same on the device.
    on_device: Tensor,
}

impl AddOrder {
    /// Of each part whether it is this rank's, which has at least one, and how many additions
    /// follow it: each adds the last two sums that are left.
    #[track_caller]
    pub fn new(parts: &[(bool, usize)], device: Device) -> Result<AddOrder> {
        let last = parts.iter().rposition(|(is_own, _)| *is_own);
        let last = last.expect("a part of this rank");
        let mut left = 0;
        let word = |(index, &(is_own, additions)): (usize, &(bool, usize))| {
            assert!(left >= additions && left < DEPTH + additions, "{parts:?}");
            left = left + 1 - additions;
            let own = if index == last { OUT } else { ROW };
            4 * additions as i32 + if is_own { own } else { OTHER }
        };
        let words: Vec<i32> = parts.iter().enumerate().map(word).collect();
        assert_eq!(left, 1, "{parts:?}");
        let on_device = Tensor::from_slice(&words, &[words.len()], device)?;
        Ok(AddOrder { words, on_device })
    }

    fn count(&self, place: i32) -> usize {
        self.words.iter().filter(|word| *word & 3 == place).count()
    }
}

/// `out` (E) becomes the sum of all parts in `order`: those of `others` (O · E), the elements from
/// `start` on of each of the `rows` (G - 1, …), and last of this rank that of `out`. Every sum is
/// rounded.
///
/// Backward: none.
#[track_caller]
pub fn add_in_order(
    out: &Tensor,
    others: &Tensor,
    rows: &Tensor,
    start: usize,
    order: &AddOrder,
) -> Result<()> {
    let mut call = Call::new("add_in_order");
    let (count, own) = (out.count(), order.count(ROW));
    let stride = rows.count() / own.max(1);
    let out = call.updates("out", out);
    let others = call.reads("others", others);
    let rows = call.reads("rows", rows);
    let words = call.reads("order", &order.on_device);
    let expected = "a part of each other that the order has";
    call.has_shape(others, &[order.count(OTHER) * count], expected)?;
    call.has_shape(rows, &[own * stride], "as many rows as the order has")?;
    if own > 0 && start + count > stride {
        let expected = format!("rows of {} elements or more", start + count);
        return Err(call.operand_error(rows, expected, "start earlier"));
    }
    call.same_dtype(others, out)?;
    call.same_dtype(rows, out)?;
    call.run(out, &FLOATS_AND_BF16, |placed| {
        let [mut out, others, rows, words] = placed.enter([out, others, rows, words])?;
        if let Some(gpu) = placed.launcher() {
            let row = rows.address() + (start * rows.dtype.bytes()) as u64;
            // Of each part its word, then its elements.
            let grid = Grid::packs(count, out.dtype).rounds_of(2 * order.words.len());
            let args = args![out, others, row, words, order.words.len(), count, stride];
            return gpu.launch(&SOURCE, ("add_in_order", placed.dtype), grid, args);
        }
        with_float!(placed.dtype, T => {
            let (others, rows) = (others.elements::<T>(), rows.elements::<T>());
            threads::split_mut(out.elements_mut::<T>(), GRAIN, |first, out| {
                for (index, out) in (first..).zip(out) {
                    let mut others = others.iter().skip(index).step_by(count);
                    let mut rows = rows.iter().skip(start + index).step_by(stride.max(1));
                    let mut left = Vec::with_capacity(DEPTH);
                    for word in &order.words {
                        let mut sum = match word & 3 {
                            OTHER => *others.next().expect("checked above"),
                            ROW => *rows.next().expect("checked above"),
                            _ => *out,
                        };
                        for _ in 0..word >> 2 {
                            sum += left.pop().expect("checked by the order");
                        }
                        left.push(sum);
                    }
                    *out = left[0];
                }
            });
        });
        Ok(())
    })
}

#[cfg(test)]
mod tests;
