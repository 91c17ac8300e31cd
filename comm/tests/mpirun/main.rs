//! Ranks that are processes, under the real `mpirun`: who they are, that ranks of one host keep off
//! the network, and that one failure ends all of them soon and is reported once.

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
    use crate::job::Job;

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

    #[test]
    fn ranks_are_numbered_host_by_host() {
        let ended = Job::on_hosts(&[("left", 1), ("right", 1), ("left", 1)], "facts").run();
        ended.assert_well();
        let transport = "\"shared memory and tcp\"";
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
        // It looks a thousand times a second.
        assert!(share.parse::<f64>().expect("a share") <= 0.1, "{ended}");
    }
}
