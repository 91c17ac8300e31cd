//! Tests of chunks.

use super::*;
use proptest::prelude::*;

fn table(parts: &[(usize, usize)]) -> ChunkTable {
    let mut offset = 0;
    let chunk = |&(gap, len): &(usize, usize)| {
        let chunk = Chunk {
            offset: offset + gap,
            len,
            decay: len % 2 == 0,
        };
        offset += gap + len;
        chunk
    };
    ChunkTable::new(parts.iter().map(chunk).collect()).unwrap()
}

proptest! {
    #[test]
    fn quanta_cover_every_chunk_once_in_order(
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
        true
    });
    for (index, (&a, &b)) in a.iter().zip(&b).enumerate() {
        let inside = table
            .chunks()
            .iter()
            .any(|chunk| chunk.range().contains(&index));
        assert_eq!((a, b), (u8::from(inside), u8::from(inside)), "{index}");
    }
}

#[test]
fn chunks_that_overlap_or_overflow_are_refused_by_index() {
    let chunk = |offset, len| Chunk {
        offset,
        len,
        decay: false,
    };
    let error = ChunkTable::new(vec![chunk(0, 10), chunk(9, 1)])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("chunks[1].offset: expected at least 10"),
        "{error}"
    );
    let error = ChunkTable::new(vec![chunk(5, usize::MAX)])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("chunks[0].offset + len: expected at most 18446744073709551615, got 5 + "),
        "{error}"
    );
    assert_eq!(ChunkTable::new(Vec::new()).unwrap().quanta(), 0);
    assert_eq!(ChunkTable::whole(2049).quanta(), 3);
}
