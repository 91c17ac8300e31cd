//! Puts documents into rows: best fit, the longest first. Each goes into the row with the least
//! room that holds it.

use std::collections::BTreeMap;

/// The documents of each row, by their numbers, for rows of `context` tokens. None is longer.
pub(super) fn best_fit(lengths: &[usize], context: usize) -> Vec<Vec<u32>> {
    let mut order: Vec<u32> = (0..lengths.len() as u32).collect();
    // Equal ones stay in their order.
    order.sort_by_key(|&document| std::cmp::Reverse(lengths[document as usize]));
    let mut rows: Vec<Vec<u32>> = Vec::new();
    // The rows with so much room, by their numbers.
    let mut open: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for document in order {
        let length = lengths[document as usize];
        let fitting = open.range_mut(length..).next();
        let (room, row) = match fitting {
            Some((&room, list)) => {
                let row = list.pop().expect("no list is empty");
                if list.is_empty() {
                    open.remove(&room);
                }
                (room, row)
            }
            None => {
                rows.push(Vec::new());
                (context, rows.len() - 1)
            }
        };
        rows[row].push(document);
        open.entry(room - length).or_default().push(row);
    }
    rows
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn documents_go_into_the_fullest_row_that_holds_them() {
        let rows = best_fit(&[3, 7, 5, 2, 10, 3], 10);
        assert_eq!(rows, [vec![4], vec![1, 0], vec![2, 5, 3]]);
    }

    proptest! {
        #[test]
        fn every_document_is_in_one_row_that_has_room(lengths in prop::collection::vec(1usize..40, 0..200)) {
            let rows = best_fit(&lengths, 40);
            let mut all: Vec<u32> = rows.concat();
            all.sort_unstable();
            prop_assert!(all.into_iter().eq(0..lengths.len() as u32));
            let filled: Vec<usize> =
                rows.iter().map(|row| row.iter().map(|&one| lengths[one as usize]).sum()).collect();
            prop_assert!(filled.iter().all(|&tokens| tokens <= 40));
            // Only the last row opened may be less than half full beside another such row.
            prop_assert!(filled.iter().filter(|&&tokens| tokens <= 20).count() <= 1);
        }
    }
}
