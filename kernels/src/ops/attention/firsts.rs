//! Where the keys of a token begin: with a window, or where a sequence holds several documents.

use std::ops::Range;

use super::blocks::BLOCK;
use super::sizes::Sizes;

/// The first key that each token attends to.
#[derive(Clone, Copy)]
pub(super) struct Firsts<'a> {
    window: Option<usize>,
    /// (B·T): where in its sequence the document of a token begins.
    begins: Option<&'a [i32]>,
}

impl<'a> Firsts<'a> {
    /// Where documents begin at `begins`, if there are several.
    pub(super) fn new(sizes: Sizes, begins: Option<&'a [i32]>) -> Firsts<'a> {
        let window = sizes.window;
        Firsts { window, begins }
    }

    /// Of token `row` of a sequence whose first is token `start` of all. It never grows beyond the
    /// token itself.
    fn of(self, start: usize, row: usize) -> usize {
        let in_window = self
            .window
            .map_or(0, |window| (row + 1).saturating_sub(window));
        let begin = self.begins.map_or(0, |begins| {
            usize::try_from(begins[start + row]).unwrap_or(0)
        });
        in_window.max(begin.min(row))
    }

    /// Of the tokens of a block; 0 where there are none.
    pub(super) fn of_block(
        self,
        sizes: Sizes,
        sequence: usize,
        rows: &Range<usize>,
    ) -> [u32; BLOCK] {
        let mut firsts = [0; BLOCK];
        if self.window.is_some() || self.begins.is_some() {
            for (first, row) in firsts.iter_mut().zip(rows.clone()) {
                *first = self.of(sequence * sizes.time, row) as u32;
            }
        }
        firsts
    }
}
