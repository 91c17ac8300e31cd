//! Is all well between ranks, as far as their devices tell? Pure: what each rank has told (`shared/gpu_page.rs`) in, a finding out.

use ddp_kernels::progress::Told;

use crate::shared::{COLLECTIVES, Seen};

/// Two ranks that did different collectives at the same place in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Apart {
    /// The other rank, by its place among those that were compared.
    pub(super) peer: usize,
    pub(super) mine: Told,
    pub(super) theirs: Told,
}

impl Apart {
    /// The two may have parted before: the calls told here are the same, or no longer known.
    pub(super) fn was_before(&self) -> bool {
        self.mine.call == self.theirs.call
    }
}

/// Whether `number` comes before `other`; both count round.
fn is_before(number: u32, other: u32) -> bool {
    (number.wrapping_sub(other) as i32) < 0
}

/// The first place at which this rank and another did different collectives.
pub(super) fn apart(mine: &Seen, others: &[(usize, Seen)]) -> Option<Apart> {
    let differences = others.iter().flat_map(|(peer, seen)| {
        let pair = |mine: &Told| {
            let theirs = seen.ring.iter().find(|theirs| theirs.number == mine.number)?;
            (theirs.chain != mine.chain).then_some(Apart { peer: *peer, mine: *mine, theirs: *theirs })
        };
        mine.ring.iter().filter_map(pair).collect::<Vec<_>>()
    });
    differences.reduce(|first, next| if is_before(next.mine.number, first.mine.number) { next } else { first })
}

/// The ranks that have not come to the collective that this one is in.
pub(super) fn missing(mine: &Seen, others: &[(usize, Seen)]) -> Vec<usize> {
    let number = mine.lanes[COLLECTIVES].begun;
    let is_missing = |(_, seen): &&(usize, Seen)| is_before(seen.lanes[COLLECTIVES].begun, number);
    others.iter().filter(is_missing).map(|(peer, _)| *peer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::Lane;

    /// A rank that did the collectives `calls`, of which the first has this number; a ring has the last 64.
    fn rank(first: u32, calls: &[u32]) -> Seen {
        let mut chain = 0u32;
        let all = calls.iter().enumerate().map(|(index, &call)| {
            chain = (chain ^ call).wrapping_mul(0x9e37_79b9) ^ chain >> 5;
            Told { number: first.wrapping_add(index as u32), call, chain, place: 0 }
        });
        let all: Vec<Told> = all.collect();
        let mut seen = Seen::default();
        let last = all.last().copied().unwrap_or_default();
        seen.lanes[COLLECTIVES] = Lane { begun: last.number, call: last.call, ended: last.number.wrapping_sub(1) };
        seen.ring = all[all.len().saturating_sub(64)..].to_vec();
        seen
    }

    #[test]
    fn ranks_that_do_the_same_are_not_apart_wherever_they_are() {
        let calls: Vec<u32> = (0..300).map(|call| call % 7).collect();
        let mine = rank(u32::MAX - 100, &calls);
        for length in [1, 5, 200, 250, 299, 300] {
            assert_eq!(apart(&mine, &[(1, rank(u32::MAX - 100, &calls[..length]))]), None);
        }
    }

    #[test]
    fn the_first_difference_is_found_and_named() {
        let mine = rank(1, &[1, 2, 3, 4, 5]);
        for (theirs, at) in [(vec![1, 2, 4, 3, 5], 2), (vec![9], 0), (vec![1, 2, 3, 5], 3)] {
            let found = apart(&mine, &[(3, rank(1, &[1, 2])), (2, rank(1, &theirs))]).unwrap();
            assert_eq!((found.peer, found.mine.number), (2, 1 + at as u32));
            assert_eq!((found.mine.call, found.theirs.call), ([1, 2, 3, 4, 5][at], theirs[at]));
            assert!(!found.was_before());
        }
    }

    #[test]
    fn a_difference_that_is_long_past_still_shows() {
        let calls: Vec<u32> = (0..300).map(|call| call % 7).collect();
        let mut theirs = calls.clone();
        theirs.swap(10, 11);
        let found = apart(&rank(1, &calls), &[(1, rank(1, &theirs))]).unwrap();
        assert!(found.was_before() && found.mine.number == 237);
    }

    #[test]
    fn who_has_not_come_is_named_also_where_numbers_begin_anew() {
        let mine = rank(u32::MAX, &[1, 2, 3]);
        let others = [(0, rank(u32::MAX, &[1])), (1, rank(u32::MAX, &[1, 2, 3])), (3, rank(u32::MAX, &[1, 2]))];
        assert_eq!(missing(&mine, &others), [0, 3]);
        assert_eq!(missing(&rank(1, &[1]), &[(1, Seen::default())]), [1]);
    }
}
