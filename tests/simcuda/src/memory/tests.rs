//! The address space: what is where, who may access it, what is reported.

use super::*;
use crate::memory::allocation::Made;

const MEMORY_BYTES: u64 = 64 << 20;
const PIECE_BYTES: u64 = 2 << 20;

fn space(devices: usize) -> AddressSpace {
    AddressSpace::new(devices, MEMORY_BYTES, OwnBytes::default())
}

fn direct(space: &mut AddressSpace, device: usize, bytes: u64) -> Arc<Allocation> {
    space
        .allocate(
            Owner::Device { device, pool: None },
            bytes,
            Made::now("cuMemAlloc", None),
        )
        .unwrap()
}

fn pooled(space: &mut AddressSpace, pool: usize, bytes: u64) -> Arc<Allocation> {
    let device = space.pools.get(pool).unwrap().device;
    let free = space.free_bytes(device);
    space.pools.take(pool, bytes, free).unwrap();
    let made = Made::now("cuMemAllocFromPoolAsync", Some(3));
    space
        .allocate(
            Owner::Device {
                device,
                pool: Some(pool),
            },
            bytes,
            made,
        )
        .unwrap()
}

fn free(space: &mut AddressSpace, allocation: &Arc<Allocation>) {
    allocation
        .begin_end(End(Made::now("cuMemFreeAsync", Some(4))))
        .unwrap();
    space.release(allocation);
}

fn told(space: &AddressSpace, device: usize, range: Range<Address>) -> Violation {
    space
        .violation(device, &range, Moment::Runs)
        .expect("it is not a range to be touched")
}

#[test]
fn allocations_are_aligned_apart_and_full_of_poison() {
    let mut space = space(2);
    let mut last = 0;
    for bytes in [1, 255, 256, 257, 4096, 100_000] {
        let allocation = direct(&mut space, 1, bytes);
        let start = allocation.range.start;
        assert_eq!(start % ALIGNMENT_BYTES, 0);
        assert!(
            start >= last + RED_ZONE_BYTES,
            "{start:#x} is too near to {last:#x}"
        );
        last = allocation.range.end;
        // SAFETY: the allocation is live and this long.
        let content =
            unsafe { std::slice::from_raw_parts(space.host_pointer(start), bytes as usize) };
        assert!(content.iter().all(|byte| *byte == POISON));
        assert!(space.check(1, allocation.range.clone()).is_ok());
    }
}

#[test]
fn a_range_that_leaves_its_allocation_is_told_by_how_much() {
    let mut space = space(1);
    let allocation = pooled(&mut space, 0, 4096);
    let violation = told(&space, 0, allocation.range.start..allocation.range.end + 64);
    assert_eq!(violation.kind, FindingKind::OutOfBounds);
    let expected = "64 bytes past the end of the 4096-byte allocation made by cuMemAllocFromPoolAsync on device 0 (stream 3) at ";
    assert!(
        violation.message.contains(expected),
        "{}",
        violation.message
    );
    assert!(
        violation.message.contains("memory/tests.rs:"),
        "{}",
        violation.message
    );
}

#[test]
fn an_unallocated_address_is_described_by_its_nearest_neighbour() {
    let mut space = space(1);
    let (first, second) = (direct(&mut space, 0, 1024), direct(&mut space, 0, 2048));
    let behind = told(&space, 0, first.range.end + 4..first.range.end + 8).message;
    assert!(
        behind.contains(
            "4 bytes past the end of the 1024-byte allocation made by cuMemAlloc on device 0"
        ),
        "{behind}"
    );
    let before = told(&space, 0, second.range.start - 8..second.range.start - 4).message;
    assert!(
        before.contains("8 bytes before the 2048-byte allocation"),
        "{before}"
    );
    let null = told(&space, 0, 0..4).message;
    assert!(null.contains("a null pointer"), "{null}");
    let local = 0u32;
    let pageable = told(
        &space,
        0,
        &raw const local as u64..&raw const local as u64 + 4,
    )
    .message;
    assert!(
        pageable.contains("pageable memory of the host"),
        "{pageable}"
    );
}

#[test]
fn an_empty_range_touches_nothing() {
    assert!(space(1).check(0, 16..16).is_ok());
}

#[test]
fn freed_memory_says_who_freed_it_and_its_address_is_not_used_again() {
    let mut space = space(1);
    let allocation = pooled(&mut space, 0, 512);
    free(&mut space, &allocation);
    let again = pooled(&mut space, 0, 512);
    assert_ne!(again.range, allocation.range);
    let violation = told(
        &space,
        0,
        allocation.range.start + 8..allocation.range.start + 12,
    );
    assert_eq!(violation.kind, FindingKind::UseAfterFree);
    for part in [
        "byte 8 of the 512-byte allocation",
        "freed by cuMemFreeAsync (stream 4) at ",
        "memory/tests.rs:",
    ] {
        assert!(
            violation.message.contains(part),
            "{part}: {}",
            violation.message
        );
    }
    assert_eq!(
        FindingKind::of_violation(&violation.message),
        FindingKind::UseAfterFree
    );
    // SAFETY: the pages of a device stay mapped after a free.
    let byte = unsafe { *space.host_pointer(allocation.range.start) };
    assert_eq!(byte, POISON);
}

#[test]
fn between_the_call_that_frees_and_its_turn_only_calls_are_too_late() {
    let mut space = space(1);
    let allocation = pooled(&mut space, 0, 512);
    allocation
        .begin_end(End(Made::now("cuMemFreeAsync", Some(4))))
        .unwrap();
    assert!(
        space
            .violation(0, &allocation.range, Moment::Queued)
            .is_some()
    );
    assert!(
        space
            .violation(0, &allocation.range, Moment::Runs)
            .is_none()
    );
    let earlier = allocation
        .begin_end(End(Made::now("cuMemFree", None)))
        .unwrap_err();
    assert!(earlier.to_string().contains("cuMemFreeAsync (stream 4)"));
}

#[test]
fn memory_of_another_device_needs_access_from_the_context_or_from_the_pool() {
    let mut space = space(3);
    let (own, of_pool) = (direct(&mut space, 0, 64), pooled(&mut space, 0, 64));
    for allocation in [&own, &of_pool] {
        let violation = told(&space, 1, allocation.range.clone());
        assert_eq!(violation.kind, FindingKind::WrongDevice);
        assert!(
            violation.message.contains("device 1 was given no access"),
            "{}",
            violation.message
        );
    }
    assert!(space.enable_peer(1, 0) && !space.enable_peer(1, 0));
    assert!(space.check(1, own.range.clone()).is_ok());
    // "Pool memory ignores cuCtxEnablePeerAccess."
    assert!(space.check(1, of_pool.range.clone()).is_err());
    space
        .pools
        .get_mut(0)
        .unwrap()
        .set_access(1, Some(pool::Access::ReadWrite));
    assert!(space.check(1, of_pool.range.clone()).is_ok());
    assert!(space.check(2, of_pool.range.clone()).is_err());
    assert!(space.disable_peer(1, 0) && !space.disable_peer(1, 0));
    assert!(space.check(1, own.range.clone()).is_err());
}

#[test]
fn a_device_has_no_more_memory_than_it_has() {
    let mut space = space(2);
    let half = direct(&mut space, 0, MEMORY_BYTES / 2);
    assert_eq!(space.free_bytes(0), MEMORY_BYTES / 2);
    let owner = Owner::Device {
        device: 0,
        pool: None,
    };
    let refused = space
        .allocate(owner, MEMORY_BYTES / 2 + 1, Made::now("cuMemAlloc", None))
        .unwrap_err();
    assert_eq!(refused, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    assert_eq!(space.free_bytes(1), MEMORY_BYTES);
    free(&mut space, &half);
    assert_eq!(space.free_bytes(0), MEMORY_BYTES);
}

#[test]
fn addresses_are_used_again_once_they_are_exhausted_and_never_while_they_live() {
    let mut space = AddressSpace::new(1, 16 << 20, OwnBytes::default());
    let kept = direct(&mut space, 0, 1 << 20);
    let first = direct(&mut space, 0, 8 << 20);
    let stale = first.range.clone();
    free(&mut space, &first);
    // 64 addresses for a byte of memory, and each of these takes half of the memory.
    let mut seen_again = false;
    for _ in 0..64 * 2 + 4 {
        let next = direct(&mut space, 0, 8 << 20);
        assert!(next.range.end <= kept.range.start || next.range.start >= kept.range.end);
        seen_again |= next.range.start < stale.end;
        assert!(space.check(0, next.range.clone()).is_ok());
        free(&mut space, &next);
    }
    assert!(
        seen_again,
        "the test allocated less than there are addresses"
    );
    assert!(space.check(0, kept.range.clone()).is_ok());
}

#[test]
fn a_pool_reserves_in_chunks_keeps_what_is_freed_and_gives_it_back_at_a_synchronisation() {
    let mut space = space(1);
    let first = pooled(&mut space, 0, PIECE_BYTES);
    let second = pooled(&mut space, 0, 1);
    let books = |space: &AddressSpace| space.pools.get(0).unwrap().books();
    assert_eq!(
        (books(&space).used, books(&space).reserved),
        (PIECE_BYTES + 512, 2 * PIECE_BYTES)
    );
    space.pools.give_back(0, PIECE_BYTES);
    free(&mut space, &first);
    assert_eq!(
        (books(&space).used, books(&space).reserved),
        (512, 2 * PIECE_BYTES)
    );
    assert_eq!(space.free_bytes(0), MEMORY_BYTES - 2 * PIECE_BYTES);
    space.release_at_synchronize();
    assert_eq!(books(&space).reserved, PIECE_BYTES);
    space.pools.give_back(0, 1);
    free(&mut space, &second);
    space.release_at_synchronize();
    assert_eq!(space.free_bytes(0), MEMORY_BYTES);
    assert_eq!(
        (books(&space).used_high, books(&space).reserved_high),
        (PIECE_BYTES + 512, 2 * PIECE_BYTES)
    );
}

#[test]
fn a_release_threshold_keeps_memory_over_synchronisations_so_that_steady_state_reserves_nothing() {
    let mut pools = pool::Pools::new(1, PIECE_BYTES);
    pools.get_mut(0).unwrap().release_threshold = u64::MAX;
    for step in 0..3 {
        for bytes in [3 * PIECE_BYTES, PIECE_BYTES / 2] {
            pools
                .take(0, bytes, MEMORY_BYTES - pools.reserved_bytes(0))
                .unwrap();
        }
        pools.give_back(0, 3 * PIECE_BYTES);
        pools.give_back(0, PIECE_BYTES / 2);
        pools.trim_all();
        assert_eq!(pools.reserved_bytes(0), 4 * PIECE_BYTES, "step {step}");
    }
    pools.get_mut(0).unwrap().trim(PIECE_BYTES);
    assert_eq!(pools.reserved_bytes(0), PIECE_BYTES);
}

#[test]
fn a_destroyed_pool_gives_everything_back_once_its_last_allocation_is_freed() {
    let mut pools = pool::Pools::new(1, PIECE_BYTES);
    let pool = pools.create(0, 0);
    pools.get_mut(pool).unwrap().release_threshold = u64::MAX;
    pools.set_current(0, pool);
    pools.take(pool, PIECE_BYTES, MEMORY_BYTES).unwrap();
    pools.take(pool, PIECE_BYTES, MEMORY_BYTES).unwrap();
    pools.give_back(pool, PIECE_BYTES);
    pools.destroy(pool);
    assert_eq!(pools.current(0), 0);
    assert_eq!(pools.reserved_bytes(0), PIECE_BYTES);
    pools.give_back(pool, PIECE_BYTES);
    assert_eq!(pools.reserved_bytes(0), 0);
}

#[test]
fn a_pool_with_a_limit_keeps_it() {
    let mut pools = pool::Pools::new(1, PIECE_BYTES);
    let pool = pools.create(0, PIECE_BYTES);
    assert!(pools.take(pool, PIECE_BYTES, MEMORY_BYTES).is_ok());
    assert_eq!(
        pools.take(pool, 1, MEMORY_BYTES),
        Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
    );
}
