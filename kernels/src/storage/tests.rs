use super::*;
use crate::stream::Stream;
use crate::{DType, Shape};

fn storage() -> Arc<Storage> {
    let info = TensorInfo {
        name: None,
        dtype: DType::U8,
        shape: Shape::new(&[64]).unwrap(),
        device: Device::Cpu,
    };
    Storage::new(
        64,
        ContentsOrigin::HostData,
        false,
        info,
        Caller::new("test"),
    )
    .unwrap()
}

#[test]
fn copies_that_are_done_do_not_pile_up() {
    let storage = storage();
    let passed = Stream::new(Device::Cpu).unwrap().record().unwrap();
    for _ in 0..1000 {
        // Reads overlap reads, so no later reader clashes with the entry.
        let entered = storage.enter(0..64, false, Caller::new("copy")).unwrap();
        entered.leave_after(passed.clone());
        assert!(lock(&storage.in_use).uses.len() <= SWEEP_AT_LEAST);
    }
    storage.enter(0..64, true, Caller::new("write")).unwrap();
    assert!(lock(&storage.in_use).uses.is_empty());
}

#[test]
fn a_range_that_is_never_left_stays_in_use_and_its_memory_is_not_reused() {
    let storage = storage();
    let entered = storage.enter(8..16, false, Caller::new("copy")).unwrap();
    entered.leave_never();
    drop(entered);
    for _ in 0..2 * SWEEP_AT_LEAST {
        let entered = storage.enter(0..64, false, Caller::new("read")).unwrap();
        entered.leave_never();
    }
    let other = storage
        .enter(10..11, true, Caller::new("write"))
        .unwrap_err();
    assert!(
        (other.by.op == "copy" || other.by.op == "read") && !other.writes,
        "{other:?}"
    );
    let address = storage.block.pointer;
    drop(storage);
    let again: Vec<Arc<Storage>> = (0..64).map(|_| self::storage()).collect();
    assert!(again.iter().all(|other| other.block.pointer != address));
}

#[test]
fn a_ranges_address_is_where_it_begins() {
    let storage = storage();
    let entered = storage.enter(24..40, false, Caller::new("read")).unwrap();
    let start = entered.elements::<u8>().as_ptr().addr();
    assert_eq!(entered.address(), start as u64);
}
