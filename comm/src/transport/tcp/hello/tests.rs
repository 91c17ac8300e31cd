use proptest::prelude::*;

use std::fmt;

use super::*;
use crate::transport::tcp::secret::SecretSource;

fn key(rank: usize, job: &str, text: Option<&str>) -> JobKey {
    JobKey::new(job, Secret::new(text), rank, 3)
}

fn known<T: fmt::Debug>(answer: Answer<T>) -> Result<T, String> {
    match answer {
        Answer::Known(known) => Ok(known),
        other => Err(format!("{other:?}")),
    }
}

/// What rank 0 and rank 2, which calls, know when they have met.
fn meet(zero: &JobKey, two: &JobKey) -> Result<[Exchange; 2], String> {
    let (number, call) = two.call(0).unwrap();
    let (caller, answer) = zero.answer(&call).unwrap();
    let caller = known(caller)?;
    assert_eq!(caller.rank, 2);
    let (called, proof) = known(two.prove(0, &number, &answer))?;
    known(zero.check(&caller, &proof))?;
    let verdict = known(two.hear(&called, &zero.verdict(&caller, WELCOME)))?;
    assert_eq!(verdict, WELCOME);
    Ok([caller, called])
}

#[test]
fn ranks_of_one_job_recognise_each_other_and_no_others() {
    for secret in [None, Some("a secret")] {
        let (zero, two) = (key(0, "job", secret), key(2, "job", secret));
        meet(&zero, &two).unwrap();
        let other = JobKey::new("other", two.secret.clone(), 2, 4);
        let error = meet(&zero, &other).unwrap_err();
        let expected = "it is rank 2 of another job (of 4 ranks, not 3)";
        assert_eq!(error, format!("Elsewhere({expected:?})"));
        let (number, call) = other.call(0).unwrap();
        let (_, answer) = zero.answer(&call).unwrap();
        let there = format!("{:?}", other.prove(0, &number, &answer));
        assert!(there.contains("another job (of 3 ranks, not 4)"), "{there}");
    }
    let of_user = |bytes: &[u8]| Secret::of(SecretSource::KeyFile, bytes);
    for (ours, theirs) in [
        (Secret::new(Some("a")), Secret::new(Some("b"))),
        (Secret::new(Some("a")), Secret::new(None)),
        (Secret::new(None), of_user(b"a")),
        (of_user(b"a"), of_user(b"b")),
    ] {
        let keys = [(0, ours), (2, theirs)].map(|(rank, it)| JobKey::new("job", it, rank, 3));
        assert_eq!(meet(&keys[0], &keys[1]).unwrap_err(), "Refused");
    }
}

#[test]
fn whoever_only_calls_gets_nothing_that_depends_on_the_secret() {
    let answers = [Some("a"), Some("b")].map(|text| {
        let (zero, stranger) = (key(0, "job", text), key(2, "job", Some("guess")));
        let (_, call) = stranger.call(0).unwrap();
        let (caller, answer) = zero.answer(&call).unwrap();
        let said: Value = serde_json::from_slice(&answer).unwrap();
        let refused = zero.check(&known(caller).unwrap(), b"[\"00\"]");
        assert!(matches!(refused, Answer::Refused));
        // Its number, which changes with each call, is the only word that differs.
        said.as_array()
            .unwrap()
            .iter()
            .enumerate()
            .filter(|(index, _)| *index != 2)
            .map(|(_, word)| word.clone())
            .collect::<Vec<_>>()
    });
    assert_eq!(answers[0], answers[1]);
    assert_eq!(JobKey::refusal(), b"[\"refused\"]");
}

#[test]
fn a_repeated_proof_is_worth_nothing_on_either_side() {
    let (zero, two) = (key(0, "job", Some("a")), key(2, "job", Some("a")));
    let (number, call) = two.call(0).unwrap();
    let (caller, answer) = zero.answer(&call).unwrap();
    let (called, proof) = known(two.prove(0, &number, &answer)).unwrap();
    let verdict = zero.verdict(&known(caller).unwrap(), WELCOME);
    assert!(known(two.hear(&called, &verdict)).is_ok());
    let (again, answer) = zero.answer(&call).unwrap();
    assert!(matches!(
        zero.check(&known(again).unwrap(), &proof),
        Answer::Refused
    ));
    let (number, _) = two.call(0).unwrap();
    let (again, _) = known(two.prove(0, &number, &answer)).unwrap();
    assert!(matches!(two.hear(&again, &verdict), Answer::Refused));
    // A welcome is no "taken".
    let taken = String::from_utf8(verdict).unwrap().replace(WELCOME, TAKEN);
    assert!(matches!(
        two.hear(&called, taken.as_bytes()),
        Answer::Refused
    ));
}

#[test]
fn the_keys_of_a_connection_differ_by_direction_and_by_connection() {
    let (zero, two) = (key(0, "job", Some("a")), key(2, "job", Some("a")));
    let mac = |seal: &mut Seal| seal.next(1, &[b"x"]);
    let mut macs = Vec::new();
    for _ in 0..2 {
        let [caller, called] = meet(&zero, &two).unwrap();
        let (mut zeros, mut twos) = (zero.seals(&caller), two.seals(&called));
        assert_eq!(mac(&mut zeros.sent), mac(&mut twos.received));
        assert_eq!(mac(&mut zeros.received), mac(&mut twos.sent));
        macs.extend([mac(&mut zeros.sent), mac(&mut zeros.received)]);
    }
    for (index, one) in macs.iter().enumerate() {
        assert!(macs[..index].iter().all(|other| other != one));
    }
}

#[test]
fn one_end_that_wants_it_makes_macs_cover_long_payloads() {
    let (zero, two) = (key(0, "job", Some("a")), key(2, "job", Some("a")));
    for (zeros, twos) in [(false, false), (true, false), (false, true)] {
        let covering = |key: &JobKey, covers_all| {
            let mut key = key.clone();
            key.secret.covers_all = covers_all;
            key
        };
        let [zero, two] = [covering(&zero, zeros), covering(&two, twos)];
        let [caller, called] = meet(&zero, &two).unwrap();
        assert_eq!(caller.covers_all, zeros || twos);
        assert_eq!(called.covers_all, zeros || twos);
    }
}

#[test]
fn garbage_is_a_stranger() {
    let zero = key(0, "job", None);
    for bytes in [
        &b""[..],
        b"GET / HTTP/1.1",
        b"[]",
        b"{\"a\":1}",
        b"\xff\xfe",
    ] {
        assert!(matches!(zero.answer(bytes).unwrap().0, Answer::Stranger));
        assert!(matches!(zero.prove(1, "", bytes), Answer::Stranger));
    }
    assert!(key(0, &"é".repeat(5000), None).call(1).unwrap().1.len() <= HELLO_BYTES_MAX);
}

proptest! {
    /// Each message of a hello, changed at one place: nobody is taken for a rank, nothing panics.
    #[test]
    fn a_changed_hello_never_ends_in_a_meeting(
        message in 0..4usize,
        at in any::<prop::sample::Index>(),
        bytes in prop::collection::vec(any::<u8>(), 0..4),
    ) {
        let (zero, two) = (key(0, "job", Some("a")), key(2, "job", Some("a")));
        let change = |number: usize, mut text: Vec<u8>| {
            if number == message {
                let at = at.index(text.len());
                let end = text.len().min(at + bytes.len().max(1));
                text.splice(at..end, bytes.iter().copied());
            }
            text
        };
        let (number, said) = two.call(0).unwrap();
        let call = change(0, said.clone());
        prop_assume!(message != 0 || call != said);
        let (caller, said) = zero.answer(&call).unwrap();
        let Answer::Known(caller) = caller else { return Ok(()) };
        let answer = change(1, said.clone());
        prop_assume!(message != 1 || answer != said);
        let Answer::Known((called, said)) = two.prove(0, &number, &answer) else { return Ok(()) };
        let proof = change(2, said.clone());
        prop_assume!(message != 2 || proof != said);
        if !matches!(zero.check(&caller, &proof), Answer::Known(())) {
            return Ok(());
        }
        let said = zero.verdict(&caller, WELCOME);
        let verdict = change(3, said.clone());
        prop_assume!(message != 3 || verdict != said);
        let heard = two.hear(&called, &verdict);
        // What neither end reads may change: the size of the job, or a space in the JSON.
        let is_same = matches!(heard, Answer::Known(_));
        prop_assert!(!is_same || (caller.numbers == called.numbers && caller.rank == called.rank));
    }
}
