//! How two ranks that have just connected recognise each other. The one that called names the job
//! and both ranks; each proves that it has the job's secret by an answer that depends on a number
//! the other has just made up. The caller proves it first: whoever only calls learns nothing from
//! which a secret could be guessed. From then on each message has a MAC. What does not follow this
//! is dropped.

use std::sync::Arc;

use serde_json::{Value, json};

use super::secret::{Secret, nonce};
use crate::error::Result;
use crate::membership::client::Client;
use crate::transport::frames::{Seal, Seals};

/// The program and the version of this protocol.
const MAGIC: &str = "ddp-train ranks 2";
/// The most bytes of one of these messages.
pub(super) const HELLO_BYTES_MAX: usize = 1024;
/// The called rank's last word to one that it takes in.
pub(super) const WELCOME: &str = "welcome";
/// To a process with the number of a rank that has joined.
pub(super) const TAKEN: &str = "taken";
/// To a process whose proof is wrong. Without a proof: it is only for the user.
const REFUSED: &str = "refused";

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

/// What both ends of a connection know once each has named itself.
#[derive(Debug)]
pub(super) struct Exchange {
    /// The calling rank.
    pub(super) rank: usize,
    ranks: String,
    numbers: [String; 2],
    covers_all: bool,
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
    /// A rank of this job, as it says, with another secret.
    Refused,
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

    fn words<'a>(&'a self, what: &'a str, exchange: &'a Exchange) -> [&'a str; 6] {
        let [calling, called] = &exchange.numbers;
        let covered = if exchange.covers_all { "all" } else { "small" };
        [what, &self.job, &exchange.ranks, calling, called, covered]
    }

    fn proof(&self, what: &str, exchange: &Exchange) -> String {
        let proof = self.secret.proof(&self.words(what, exchange));
        proof.to_hex().to_string()
    }

    /// The keys of a connection whose ends have proven that they have the secret.
    pub(super) fn seals(&self, exchange: &Exchange) -> Seals {
        let seal = |from| {
            let key = self.secret.proof(&self.words(from, exchange));
            Seal::new(*key.as_bytes(), exchange.covers_all)
        };
        let (calling, called) = (seal("frames of calling"), seal("frames of called"));
        let (sent, received) = if exchange.rank == self.rank {
            (calling, called)
        } else {
            (called, calling)
        };
        Seals { sent, received }
    }

    /// What the calling rank says first, and its number.
    pub(super) fn call(&self, to: usize) -> Result<(String, Vec<u8>)> {
        let number = nonce()?;
        let all = self.secret.covers_all;
        let call = json!([MAGIC, self.job, self.rank, to, number, self.size, all]);
        Ok((number, call.to_string().into_bytes()))
    }

    /// The called rank's answer to the first message, and what it has learnt.
    pub(super) fn answer(&self, call: &[u8]) -> Result<(Answer<Exchange>, Vec<u8>)> {
        let call: Value = serde_json::from_slice(call).unwrap_or_default();
        let is_rank = call[0] == MAGIC;
        let (true, Some(rank), Some(theirs)) = (is_rank, call[2].as_u64(), call[4].as_str()) else {
            return Ok((Answer::Stranger, Vec::new()));
        };
        if call[1] != self.job || call[3] != self.rank || rank == self.rank as u64 {
            // Not this job's name: who has it may join.
            let said = json!([MAGIC, null, self.size]).to_string();
            let reason = format!("it is rank {rank} of {}", self.other_job(&call[5]));
            return Ok((Answer::Elsewhere(reason), said.into_bytes()));
        }
        let exchange = Exchange {
            rank: rank as usize,
            ranks: format!("{rank} {}", self.rank),
            numbers: [theirs.to_string(), nonce()?],
            covers_all: self.secret.covers_all || call[6] == true,
        };
        let (number, all) = (&exchange.numbers[1], exchange.covers_all);
        let said = json!([MAGIC, self.job, number, all]).to_string();
        Ok((Answer::Known(exchange), said.into_bytes()))
    }

    /// The calling rank's second message, which answers the called rank's first.
    pub(super) fn prove(
        &self,
        to: usize,
        number: &str,
        answer: &[u8],
    ) -> Answer<(Exchange, Vec<u8>)> {
        let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
        if answer[0] == MAGIC && answer[1] != self.job {
            return Answer::Elsewhere(format!("{} listens there", self.other_job(&answer[2])));
        }
        let (true, Some(theirs)) = (answer[0] == MAGIC, answer[2].as_str()) else {
            return Answer::Stranger;
        };
        let exchange = Exchange {
            rank: self.rank,
            ranks: format!("{} {to}", self.rank),
            numbers: [number.to_string(), theirs.to_string()],
            covers_all: self.secret.covers_all || answer[3] == true,
        };
        let proof = json!([self.proof("calling", &exchange)]).to_string();
        Answer::Known((exchange, proof.into_bytes()))
    }

    /// Whether the calling rank's second message is right.
    pub(super) fn check(&self, exchange: &Exchange, proof: &[u8]) -> Answer<()> {
        let proof: Value = serde_json::from_slice(proof).unwrap_or_default();
        let proof = proof[0].as_str().unwrap_or_default();
        let words = self.words("calling", exchange);
        if self.secret.accepts(&words, proof) {
            return Answer::Known(());
        }
        Answer::Refused
    }

    /// The called rank's second message: WELCOME or TAKEN, with the proof that it has the secret.
    pub(super) fn verdict(&self, exchange: &Exchange, verdict: &str) -> Vec<u8> {
        let proof = self.proof(verdict, exchange);
        json!([verdict, proof]).to_string().into_bytes()
    }

    /// The called rank's second message to a rank whose proof is wrong.
    pub(super) fn refusal() -> Vec<u8> {
        json!([REFUSED]).to_string().into_bytes()
    }

    /// Which of the two the called rank has said.
    pub(super) fn hear(&self, exchange: &Exchange, message: &[u8]) -> Answer<&'static str> {
        let message: Value = serde_json::from_slice(message).unwrap_or_default();
        let proof = message[1].as_str().unwrap_or_default();
        let verdicts = [WELCOME, TAKEN].into_iter();
        let mut said = verdicts.filter(|&verdict| message[0] == verdict);
        match said.next() {
            Some(verdict) if self.secret.accepts(&self.words(verdict, exchange), proof) => {
                Answer::Known(verdict)
            }
            None if message[0] != REFUSED => Answer::Stranger,
            _ => Answer::Refused,
        }
    }
}

#[cfg(test)]
mod tests;
