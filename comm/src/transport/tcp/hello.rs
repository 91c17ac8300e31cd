//! How two ranks that have just connected recognise each other. The one that called names the job
//! and both ranks; each proves that it has the job's secret by an answer that depends on a number
//! the other has just made up. What does not follow this is dropped.

use std::sync::Arc;

use serde_json::{Value, json};

use super::secret::{SECRET, Secret, nonce};
use crate::error::Result;
use crate::membership::client::Client;

/// The program and the version of this protocol.
const MAGIC: &str = "ddp-train ranks 1";
/// The most bytes of one of these messages.
pub(super) const HELLO_BYTES_MAX: usize = 1024;

/// By what a rank recognises others of its job.
#[derive(Clone, Debug)]
pub(crate) struct JobKey {
    /// A hash of the job's name.
    job: String,
    pub(crate) secret: Secret,
    /// This rank.
    pub(crate) rank: usize,
    /// How many ranks the job has.
    size: usize,
    /// In a job that continues without lost ranks: ends waits for ranks that do not come.
    pub(super) client: Option<Arc<Client>>,
}

/// What the rank that was called knows about the one that called.
#[derive(Debug)]
pub(super) struct CallingRank {
    pub(super) rank: usize,
    numbers: [String; 2],
}

/// What to do with a message.
#[derive(Debug)]
pub(super) enum Answer<T> {
    /// It is a rank of this job.
    Known(T),
    /// Another program.
    Stranger,
    /// A rank of another job. Other addresses may have one of this job.
    Elsewhere(String),
    /// A rank of this job, as it says, with another secret: why.
    Refused(String),
}

impl JobKey {
    pub(crate) fn new(job: &str, secret: Secret, rank: usize, size: usize) -> JobKey {
        JobKey {
            job: blake3::hash(job.as_bytes()).to_hex().to_string(),
            secret,
            rank,
            size,
            client: None,
        }
    }

    pub(crate) fn with(self, client: Option<Arc<Client>>) -> JobKey {
        JobKey { client, ..self }
    }

    /// A job with a name or number of ranks other than this one's.
    fn other_job(&self, size: &Value) -> String {
        match size.as_u64().filter(|&size| size != self.size as u64) {
            Some(size) => format!("another job (of {size} ranks, not {})", self.size),
            None => "another job".into(),
        }
    }

    fn words<'a>(
        &'a self,
        side: &'a str,
        ranks: &'a str,
        numbers: &'a [String; 2],
    ) -> [&'a str; 5] {
        [side, &self.job, ranks, &numbers[0], &numbers[1]]
    }

    /// What the calling rank says first, and its number.
    pub(super) fn call(&self, to: usize) -> Result<(String, Vec<u8>)> {
        let number = nonce()?;
        let is_set = self.secret.is_set();
        let call = json!([MAGIC, self.job, self.rank, to, number, is_set, self.size]);
        Ok((number, call.to_string().into_bytes()))
    }

    /// The called rank's answer to the first message, and what it has learnt.
    pub(super) fn answer(&self, call: &[u8]) -> Result<(Answer<CallingRank>, Vec<u8>)> {
        let call: Value = serde_json::from_slice(call).unwrap_or_default();
        let is_rank = call[0] == MAGIC;
        let (true, Some(rank), Some(theirs)) = (is_rank, call[2].as_u64(), call[4].as_str()) else {
            return Ok((Answer::Stranger, Vec::new()));
        };
        if call[1] != self.job || call[3] != self.rank {
            // Not this job's name: who has it may join.
            let said = json!([MAGIC, null, self.size]).to_string();
            let reason = format!("it is rank {rank} of {}", self.other_job(&call[6]));
            return Ok((Answer::Elsewhere(reason), said.into_bytes()));
        }
        let (number, is_set) = (nonce()?, self.secret.is_set());
        let numbers = [theirs.to_string(), number];
        let ranks = format!("{rank} {}", self.rank);
        let proof = self.secret.proof(&self.words("called", &ranks, &numbers));
        let said = json!([MAGIC, self.job, numbers[1], proof, is_set]).to_string();
        let answer = if call[5] == is_set {
            Answer::Known(CallingRank {
                rank: rank as usize,
                numbers,
            })
        } else {
            Answer::Refused(as_it_says(rank, &difference(is_set)))
        };
        Ok((answer, said.into_bytes()))
    }

    /// The calling rank's second message, which answers the called rank's first.
    pub(super) fn prove(&self, to: usize, number: &str, answer: &[u8]) -> Answer<Vec<u8>> {
        let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
        if answer[0] == MAGIC && answer[1] != self.job {
            return Answer::Elsewhere(format!("{} listens there", self.other_job(&answer[2])));
        }
        let (true, Some(theirs), Some(proof)) =
            (answer[0] == MAGIC, answer[2].as_str(), answer[3].as_str())
        else {
            return Answer::Stranger;
        };
        if answer[4] != self.secret.is_set() {
            return Answer::Refused(difference(self.secret.is_set()));
        }
        let numbers = [number.to_string(), theirs.to_string()];
        let ranks = format!("{} {to}", self.rank);
        if !self
            .secret
            .accepts(&self.words("called", &ranks, &numbers), proof)
        {
            return Answer::Refused(format!("it has another {SECRET}"));
        }
        let proof = self.secret.proof(&self.words("calling", &ranks, &numbers));
        Answer::Known(json!([proof]).to_string().into_bytes())
    }

    /// Whether the calling rank's second message is right. It is empty where the answer was not.
    pub(super) fn check(&self, caller: &CallingRank, proof: &[u8]) -> Answer<()> {
        let proof: Value = serde_json::from_slice(proof).unwrap_or_default();
        let proof = proof[0].as_str().unwrap_or("none");
        let ranks = format!("{} {}", caller.rank, self.rank);
        let words = self.words("calling", &ranks, &caller.numbers);
        if self.secret.accepts(&words, proof) {
            return Answer::Known(());
        }
        let reason = format!("it has another {SECRET}");
        Answer::Refused(as_it_says(caller.rank as u64, &reason))
    }
}

fn as_it_says(rank: u64, reason: &str) -> String {
    format!("rank {rank}, as it says: {reason}")
}

fn difference(is_set: bool) -> String {
    if is_set {
        return format!("it has no {SECRET}, and this rank has one");
    }
    format!("it has a {SECRET}, and this rank has none")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(rank: usize, job: &str, secret: Option<&str>) -> JobKey {
        JobKey::new(job, Secret::new(secret), rank, 3)
    }

    /// What rank 0 and rank 2 make of each other.
    fn meet(zero: &JobKey, two: &JobKey) -> Result<(), String> {
        let (number, call) = two.call(0).unwrap();
        let (caller, answer) = zero.answer(&call).unwrap();
        let caller = match caller {
            Answer::Known(caller) => caller,
            other => return Err(format!("{other:?}")),
        };
        assert_eq!(caller.rank, 2);
        let proof = match two.prove(0, &number, &answer) {
            Answer::Known(proof) => proof,
            other => return Err(format!("{other:?}")),
        };
        match zero.check(&caller, &proof) {
            Answer::Known(()) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    }

    #[test]
    fn ranks_of_one_job_recognise_each_other_and_no_others() {
        for secret in [None, Some("a secret")] {
            let (zero, two) = (key(0, "job", secret), key(2, "job", secret));
            meet(&zero, &two).unwrap();
            let other = JobKey::new("other", Secret::new(secret), 2, 4);
            let error = meet(&zero, &other).unwrap_err();
            let expected = "it is rank 2 of another job (of 4 ranks, not 3)";
            assert_eq!(error, format!("Elsewhere({expected:?})"));
            let (number, call) = other.call(0).unwrap();
            let (_, answer) = zero.answer(&call).unwrap();
            let there = format!("{:?}", other.prove(0, &number, &answer));
            assert!(there.contains("another job (of 3 ranks, not 4)"), "{there}");
        }
        for (ours, theirs, reason) in [
            (Some("a"), Some("b"), "another DDP_JOB_SECRET"),
            (Some("a"), None, "it has no DDP_JOB_SECRET"),
            (None, Some("b"), "it has a DDP_JOB_SECRET"),
        ] {
            let error = meet(&key(0, "job", ours), &key(2, "job", theirs)).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_repeated_proof_is_worth_nothing() {
        let (zero, two) = (key(0, "job", Some("a")), key(2, "job", Some("a")));
        let (number, call) = two.call(0).unwrap();
        let (_, answer) = zero.answer(&call).unwrap();
        let Answer::Known(proof) = two.prove(0, &number, &answer) else {
            panic!("they know each other");
        };
        let (Answer::Known(caller), _) = zero.answer(&call).unwrap() else {
            panic!("the call is the same");
        };
        assert!(matches!(zero.check(&caller, &proof), Answer::Refused(_)));
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
}
