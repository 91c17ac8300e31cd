//! Ranks that are processes, under the real `mpirun`: who they are, that sums have the
//! same bits on any hosts, and that one failure ends all of them soon and is reported once.

#[cfg(feature = "mpi")]
mod faults;
#[cfg(feature = "mpi")]
mod gpu_rank;
#[cfg(feature = "mpi")]
mod gpus;
#[cfg(feature = "mpi")]
mod job;
#[cfg(feature = "mpi")]
mod rank;

#[cfg(not(feature = "mpi"))]
#[test]
fn ranks_under_mpirun() {
    ddp_testing::skip("built without the feature mpi");
}

#[cfg(feature = "mpi")]
mod together {
    use crate::job::{Ended, Job};

    #[test]
    fn ranks_find_their_places_and_keep_off_the_network() {
        let ended = Job::new(3, "facts").run();
        ended.assert_well();
        for rank in 0..3 {
            let place = ended.told(&format!("place {rank}"));
            assert!(
                place[0].starts_with(&format!("(3, {rank}, 3, 1, ")),
                "{ended}"
            );
            assert!(place[0].ends_with("\"shared memory\")"), "{ended}");
        }
        assert_eq!(
            ended.told("hello"),
            [r#"["rank 0", "rank 1", "rank 2"]"#; 3],
            "{ended}"
        );
        assert_eq!(ended.told("word"), ["\"from 2\""; 3], "{ended}");
        assert_eq!(ended.told("listening"), ["[]"; 3], "{ended}");
        // A panic that the caller handles ends nothing.
        assert!(!ended.stderr.contains("panicked"), "{ended}");
    }

    #[test]
    fn ranks_find_each_other_under_a_launcher_that_gives_no_numbers() {
        let ended = Job::under_another_launcher(2, "facts").run();
        ended.assert_well();
        assert!(
            ended.told("place 1")[0].starts_with("(2, 1, 2, 1, "),
            "{ended}"
        );
    }

    fn digests(ended: &Ended) -> Vec<&str> {
        ended.assert_well();
        let mut all = ended.told("digest");
        all.sort_unstable();
        assert!(all.len() > 100, "{ended}");
        all
    }

    #[test]
    fn sums_have_the_same_bits_on_any_hosts() {
        let shared = Job::new(4, "sums").run();
        let shared = digests(&shared);
        // Four ranks reported every operation, and all the same digest.
        let odd = shared
            .chunks(4)
            .find(|four| four.iter().any(|told| *told != four[0]));
        assert_eq!(odd, None);
        let placements = [
            &[("left", 2), ("right", 2)][..],
            &[("a", 1), ("b", 2), ("c", 1)],
            &[("a", 1), ("b", 2), ("a", 1)],
        ];
        for hosts in ddp_testing::cases_of("sums on hosts", placements, 1) {
            let hosts = Job::on_hosts(hosts, "sums").run();
            assert_eq!(digests(&hosts), shared);
        }
    }

    #[test]
    #[ignore = "takes 5 GB of memory and half a minute"]
    fn tensors_beyond_what_mpi_can_count_arrive_whole() {
        let ended = Job::on_hosts(&[("left", 1), ("right", 1)], "large").run();
        ended.assert_well();
        assert_eq!(ended.told("gathered"), ["[1, 1, 2, 2]"; 2], "{ended}");
        assert_eq!(ended.told("broadcast"), ["[1, 1, 2, 2]"; 2], "{ended}");
    }

    #[test]
    fn ranks_are_numbered_host_by_host() {
        let ended = Job::on_hosts(&[("left", 1), ("right", 1), ("left", 1)], "facts").run();
        ended.assert_well();
        let transport = "\"shared memory and mpi\"";
        for (rank, place) in [
            (0, "0, 2, 2, \"left\""),
            (1, "1, 2, 2, \"left\""),
            (2, "0, 1, 2, \"right\""),
        ] {
            let expected = format!("(3, {place}, {transport})");
            assert_eq!(ended.told(&format!("place {rank}")), [expected], "{ended}");
        }
        assert_eq!(
            ended.told("hello"),
            [r#"["rank 0", "rank 1", "rank 2"]"#; 3],
            "{ended}"
        );
    }

    #[test]
    fn a_rank_that_waits_for_another_host_burns_no_core() {
        let ended = Job::on_hosts(&[("left", 1), ("right", 1)], "late 1").run();
        ended.assert_well();
        let [share] = ended.told("cpu share")[..] else {
            panic!("one rank waits: {ended}")
        };
        // Through MPI a waiting rank looks a thousand times a second.
        assert!(share.parse::<f64>().expect("a share") <= 0.1, "{ended}");
    }
}
