use super::*;
use proptest::prelude::*;

fn shares(masks: &[Cores], available: usize) -> Vec<CoreShare> {
    (0..masks.len())
        .map(|rank| CoreShare::new(masks, rank, Some(available)))
        .collect()
}

#[test]
fn ranks_that_share_cores_divide_them_and_start_apart() {
    let all: Cores = (0..8).collect();
    let shares = shares(&[all.clone(), all.clone(), all], 8);
    let threads: Vec<usize> = shares.iter().map(|share| share.threads).collect();
    let first: Vec<usize> = shares.iter().map(|share| share.first_core).collect();
    assert_eq!((threads, first), (vec![2, 2, 2], vec![0, 2, 4]));
    assert!(shares.iter().all(|share| share.narrower.is_none()));
}

#[test]
fn ranks_bound_apart_keep_all_their_cores() {
    let shares = shares(&[vec![0, 1], vec![2, 3]], 4);
    assert!(shares.iter().all(|share| *share
        == CoreShare {
            threads: 2,
            first_core: 0,
            narrower: None
        }));
}

#[test]
fn a_rank_bound_to_less_than_its_share_is_reported() {
    assert_eq!(
        CoreShare::new(&[vec![0]], 0, Some(16)).narrower,
        Some((1, 16))
    );
    assert_eq!(
        CoreShare::new(&[vec![0], vec![1]], 1, Some(16)).narrower,
        Some((1, 8))
    );
    // Two ranks with a core each of two are not reported, nor if the launcher's cores are unknown.
    assert_eq!(
        CoreShare::new(&[vec![0], vec![1]], 1, Some(2)).narrower,
        None
    );
    assert_eq!(CoreShare::new(&[vec![0]], 0, None).narrower, None);
}

#[test]
fn more_ranks_than_cores_get_a_thread_each() {
    let shares = shares(&[vec![0, 1], vec![0, 1], vec![0, 1]], 2);
    assert!(
        shares
            .iter()
            .all(|share| share.threads == 1 && share.narrower.is_none())
    );
    assert_eq!(
        shares
            .iter()
            .map(|share| share.first_core)
            .collect::<Vec<_>>(),
        [0, 1, 0]
    );
}

#[test]
fn no_mask_at_all_is_one_thread() {
    assert_eq!(
        CoreShare::new(&[vec![]], 0, None),
        CoreShare {
            threads: 1,
            first_core: 0,
            narrower: None
        }
    );
}

#[test]
fn the_system_and_the_thread_pool_agree_on_the_cores() {
    assert_eq!(affinity(0).unwrap(), own_cores());
    assert!(affinity(i32::MAX).is_err());
}

proptest! {
    #[test]
    fn equal_masks_are_cut_without_overlap(cores in 1usize..64, ranks in 1usize..16) {
        let masks = vec![(0..cores).collect::<Cores>(); ranks];
        let mut used = vec![0; cores];
        for rank in 0..ranks {
            let share = CoreShare::new(&masks, rank, Some(cores));
            prop_assert!(share.narrower.is_none());
            (0..share.threads).for_each(|thread| used[(share.first_core + thread) % cores] += 1);
        }
        let most = ranks.div_ceil(cores);
        prop_assert!(used.iter().all(|&count| count <= most), "{used:?}");
    }
}

#[test]
fn ranks_have_room_if_there_is_a_core_for_each() {
    assert!(are_roomy(&[vec![0, 1], vec![1, 2]], 3));
    assert!(!are_roomy(&[vec![0, 1], vec![0, 1]], 3));
}
