use super::*;
use proptest::prelude::*;

/// Every region of a layout, with its length.
fn everything(layout: &Layout) -> Vec<(usize, usize)> {
    let ranks = layout.ranks;
    let mut all = vec![(0, PAGE_BYTES)];
    all.extend((0..CAUSES).map(|index| (layout.cause(index), CAUSE_BYTES)));
    all.extend((0..ranks).map(|rank| (layout.page(rank), PAGE_BYTES)));
    for channel in 0..CHANNELS {
        for rank in 0..ranks {
            all.push((layout.gpu_page(channel, rank), GPU_PAGE_BYTES));
            all.push((layout.control(channel, rank), PAGE_BYTES));
            for slot in 0..DEPTH {
                all.push((layout.small(channel, rank, slot), layout.small_bytes));
                all.push((layout.made(channel, rank, slot), layout.piece_bytes));
                for other in 0..ranks {
                    all.push((layout.given(channel, rank, slot, other), layout.piece_bytes));
                    all.push((layout.chunk(channel, rank, other, slot), layout.chunk_bytes));
                }
            }
            all.extend((0..ranks).map(|other| (layout.mail(channel, rank, other), PAGE_BYTES)));
        }
    }
    all
}

#[test]
fn no_two_regions_overlap_and_all_are_within_the_segment() {
    for layout in (1..9)
        .chain([31])
        .flat_map(|ranks| [Layout::new(ranks).unwrap(), Layout::tiny(ranks)])
    {
        let mut all = everything(&layout);
        all.sort_unstable();
        assert!(
            all.windows(2)
                .all(|pair| pair[0].0 + pair[0].1 <= pair[1].0),
            "{layout:?}"
        );
        let &(start, bytes) = all.last().unwrap();
        assert!(start + bytes <= layout.bytes(), "{layout:?}");
        assert!(
            all.iter()
                .all(|&(start, _)| start.is_multiple_of(GRAIN_BYTES))
        );
    }
}

#[test]
fn what_ranks_give_an_owner_is_at_equal_distances() {
    for layout in [Layout::new(5).unwrap(), Layout::tiny(5)] {
        for rank in 0..5 {
            let from = |rank| layout.given(3, rank, 1, 2);
            assert_eq!(from(rank), from(0) + rank * layout.given_stride());
            assert_eq!(
                layout.small(3, rank, 1),
                layout.small(3, 0, 1) + rank * layout.small_stride()
            );
        }
    }
}

#[test]
fn a_host_without_ranks_or_with_too_many_is_refused() {
    assert!(Layout::new(0).is_err());
    assert!(Layout::new(RANKS_MAX).is_ok());
    let message = Layout::new(RANKS_MAX + 1).unwrap_err().to_string();
    assert!(message.contains("257 ranks") && message.contains("1 to 256"));
}

proptest! {
    #[test]
    fn slices_and_pieces_cover_everything_once_and_fit(
        bytes in prop_oneof![0usize..3000, (1usize << 31) - 70..(1 << 31) + 70, (1usize << 40)..(1 << 40) + 9000],
        slices in 1usize..9,
        grains in 1usize..5,
        large in any::<bool>(),
    ) {
        // Pieces of a usual size where there would be too many to look at.
        let piece_bytes_max = if bytes < 3000 { grains * GRAIN_BYTES } else { grains << 34 };
        let piece_bytes_max = if large { piece_bytes_max * 3 } else { piece_bytes_max };
        for cut in [
            SliceCut::even(bytes, slices, piece_bytes_max),
            SliceCut::equal(bytes / slices * slices, slices, piece_bytes_max),
        ] {
            let mut next = 0;
            for rank in 0..slices {
                prop_assert_eq!(cut.slice(rank).start, next);
                prop_assert!(cut.equal || next == cut.bytes || next.is_multiple_of(GRAIN_BYTES));
                for index in 0..cut.pieces {
                    let piece = cut.piece(rank, index);
                    prop_assert_eq!(piece.start, next);
                    prop_assert!(piece.len() <= piece_bytes_max);
                    next = piece.end;
                }
                prop_assert_eq!(cut.slice(rank).end, next);
            }
            prop_assert_eq!(next, cut.bytes);
        }
    }

    #[test]
    fn slices_differ_by_a_grain_at_most(bytes in 0usize..100_000, slices in 1usize..9) {
        let lengths = || (0..slices).map(|rank| SliceCut::even(bytes, slices, 4096).slice(rank).len());
        prop_assert!(lengths().max().unwrap() - lengths().min().unwrap() <= 2 * GRAIN_BYTES);
    }
}

#[test]
fn a_tensor_near_the_end_of_memory_is_cut_without_overflow() {
    let cut = SliceCut::even(isize::MAX as usize, 7, 1 << 60);
    assert_eq!(cut.piece(6, cut.pieces - 1).end, isize::MAX as usize);
}
