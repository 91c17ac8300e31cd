//! `ddp-train tokenize`: from texts to files of tokens.

use std::path::Path;
use std::time::Instant;

use ddp_comm::World;
use ddp_kernels::threads;

use crate::cli::TokenizeFlags;
use crate::data::text::{self, Side, Sizes, TokenizeOptions, Tokenized, TokenizerChoice};
use crate::error::{Error, Result};
use crate::output::{Say, warn_unprinted};
use crate::progress::ReadProgress;
use crate::shown::{shown, significant};
use crate::units::count;

/// Writes a folder of shards.
pub fn tokenize(flags: &TokenizeFlags, world: &World, say: Say<'_>) -> Result<()> {
    if world.size() > 1 {
        return Err(Error::Usage(format!(
            "tokenize: expected one process, which uses all cores, got {} ranks; help: start it \
             without mpirun",
            world.size()
        )));
    }
    let options = TokenizeOptions {
        files: flags.files.clone(),
        tokenizer: match (&flags.tokenizer, flags.train_bpe) {
            (_, Some(size)) => TokenizerChoice::Learned(size),
            (Some(path), None) if path != Path::new("bytes") => TokenizerChoice::File(path.clone()),
            _ => TokenizerChoice::Bytes,
        },
        end_token: flags.end_token.clone(),
        field: flags.field.clone(),
        lossy: flags.lossy,
        val_split: flags.val_split,
        out: flags.out.clone(),
        sizes: Sizes::default(),
    };
    threads::set_count(flags.threads.unwrap_or_else(|| world.default_threads()))?;
    let mut progress = ReadProgress::new(flags.progress);
    let began = Instant::now();
    let done = text::tokenize(&options, &mut |at| {
        let what = match at.is_learning {
            true => "learning the vocabulary",
            false => "tokenizing",
        };
        progress.at(what, at.read_bytes, at.file_bytes);
    });
    drop(progress);
    let done = done?;
    let out = shown(&flags.out.to_string_lossy());
    let [train, val] = done.sides;
    let vocabulary = count(done.vocabulary as u64);
    let mut summary = format!("{out}: {}, vocabulary {vocabulary}\n", describe(train));
    if val.shards > 0 {
        summary += &format!("{out}/val: {}\n", describe(val));
    }
    summary += &describe_work(&done, began.elapsed().as_secs_f64());
    warn_unprinted(say(&summary));
    Ok(())
}

fn describe(side: Side) -> String {
    let (tokens, documents) = (count(side.tokens), count(side.documents));
    format!(
        "tokens {tokens}, documents {documents}, shards {}",
        side.shards
    )
}

/// What was done this time.
fn describe_work(done: &Tokenized, seconds: f64) -> String {
    let mb = done.text_bytes as f64 / 1e6;
    let (size, rate) = (significant(mb, 3), significant(mb / seconds, 3));
    let mut text = format!("{size} MB of text in {seconds:.1} s: {rate} MB/s");
    for (what, count) in [
        ("shards that were there", done.known_shards as u64),
        ("documents without text, skipped", done.empty_documents),
    ] {
        if count > 0 {
            text += &format!("; {what}: {count}");
        }
    }
    text
}
