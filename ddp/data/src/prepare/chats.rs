//! From files of conversations to rows of tokens.

use std::cmp::Reverse;
use std::path::PathBuf;
use std::sync::Arc;

use ddp_kernels::setting::{Choice, SettingName};
use twox_hash::XxHash3_64;

use super::kind::{DataKind, context, kind, task_of_model};
use crate::chat::{ChatFile, ChatRows, Coder, Document};
use crate::dataset::{Dataset, NoRows};
use crate::error::{Result, bail, ensure};
use crate::ranks::{Ranks, agree, in_turn, must_be_alike};
use crate::request::{Data, DataRequest};
use crate::resolve::files;
use crate::sampler::Split;
use crate::scan;
use crate::setting::{CONTEXT, DATA, INIT_FROM, TOKENIZER, VAL_DATA};
use crate::tables::Tables;
use crate::task::{LossOn, TaskSpec, TokenizerId};

/// What all rows of a request have in common.
struct ChatRequest<'a> {
    request: &'a DataRequest,
    tables: Option<&'static dyn Tables>,
    ranks: &'a dyn Ranks,
    coder: Coder,
    context: usize,
    task: TaskSpec,
}

/// Conversations of files.
struct Conversations {
    files: Arc<[ChatFile]>,
    documents: Vec<Document>,
    /// Identifies their tokens.
    content: String,
    /// The BLAKE3 of the same.
    blake3: String,
}

/// Rows to train on or to use a model on, and rows to evaluate on.
pub(super) fn prepare(
    request: &DataRequest,
    path: &str,
    tables: Option<&'static dyn Tables>,
    ranks: &dyn Ranks,
) -> Result<Data> {
    let Some(tokenizer) = &request.tokenizer else {
        bail!(
            Usage,
            "{DATA} {}: expected a tokenizer, which turns conversations into tokens, got none; help: put tokenizer.json \
             into the folder of {INIT_FROM}, or give {TOKENIZER} FOLDER",
            request.data
        );
    };
    let coder = agree(ranks, Coder::open(tokenizer, request.loss_on))?;
    let rows = ChatRequest {
        context: context(request, None, &format!(", or give {CONTEXT}"))?,
        task: task(request, &coder)?,
        request,
        tables,
        ranks,
        coder,
    };
    let has_date = |template: &crate::chat::Template| template.has_date;
    if ranks.rank() == 0 && rows.coder.format.template.as_ref().is_some_and(has_date) {
        tracing::info!(
            "{TOKENIZER} {}: its chat template writes the date of the day: 26 July 2024 is used on every day, so that the \
             same data give the same tokens",
            tokenizer.display()
        );
    }
    let all = rows.open(path, DATA)?;
    let about = rows.describe(&all);
    let (train, held_out) = match &request.val_data {
        Some(spec) => {
            let DataKind::Conversations(path) = kind(request, spec, VAL_DATA, ranks)? else {
                bail!(
                    "{VAL_DATA} {spec}: expected conversations, as {DATA} has, got another file; help: give .jsonl"
                );
            };
            let mut val = rows.open(&path, VAL_DATA)?;
            rows.sort(&mut val.documents);
            (rows.of(&all, None), Some(rows.of(&val, None)))
        }
        None if request.val_split > 0.0 => {
            let count = all.documents.len() as u64;
            let split = Split::new(count, request.val_split, request.seed)?;
            let side = |is_held_out| rows.of(&all, Some((&split, is_held_out)));
            (side(false), Some(side(true)))
        }
        None => (rows.of(&all, None), None),
    };
    let mut understood = format!("{}, {about}", train.task());
    if request.packed {
        let padding = train.padding_share() * 100.0;
        understood += &format!(", {padding:.1}% of the rows is padding");
    }
    let held_out: Arc<dyn Dataset> = match held_out {
        Some(rows) => Arc::new(rows),
        None => Arc::new(NoRows(train.spec().clone())),
    };
    Ok(Data {
        tokenizer: Some(rows.coder.vocabulary.clone()),
        ..Data::new(Arc::new(train), held_out, understood)
    })
}

/// What is to be learned: what the model has learned, if it is trained already.
fn task(request: &DataRequest, coder: &Coder) -> Result<TaskSpec> {
    let vocabulary = &coder.vocabulary;
    let Some((task, owner)) = task_of_model(request)? else {
        return Ok(TaskSpec::NextToken {
            vocabulary: request.vocabulary.unwrap_or(vocabulary.size),
            are_bytes: false,
            tokenizer: Some(TokenizerId {
                hash: vocabulary.hash.clone(),
                end_of_text: Some(coder.end as usize),
            }),
            packed: request.packed,
        });
    };
    let is_same = match task {
        TaskSpec::NextToken {
            tokenizer: Some(id),
            ..
        } => id.hash == vocabulary.hash,
        _ => true,
    };
    let what = "expected the tokenizer of";
    ensure!(
        is_same,
        "{TOKENIZER}: {what} {owner}, got another; help: give the one that it was trained with"
    );
    Ok(task.clone())
}

impl ChatRequest<'_> {
    /// Opens files on one rank of a host first, which makes their tokens.
    fn open(&self, path: &str, setting: SettingName<'static>) -> Result<Conversations> {
        let cache_dir = self.request.cache_dir.as_deref();
        let all = in_turn(self.ranks, || {
            let all = files(path, setting)?;
            let open = |(number, path): (usize, &PathBuf)| {
                ChatFile::open(path, number, &self.coder, self.tables, cache_dir)
            };
            all.iter().enumerate().map(open).collect::<Result<Vec<_>>>()
        })?;
        let documents: Vec<Document> = all
            .iter()
            .flat_map(|file| file.documents.iter().copied())
            .collect();
        let sums: String = all.iter().map(|file| &*file.content).collect();
        let content = format!("content {:016x}", XxHash3_64::oneshot(sums.as_bytes()));
        let names: Vec<_> = all
            .iter()
            .map(|file| file.path.display().to_string())
            .collect();
        let values = [
            ("the files", names.join("\n")),
            ("the number of conversations", documents.len().to_string()),
            ("the content of the tokens", content.clone()),
        ];
        must_be_alike(self.ranks, &format!("{setting} {path}"), &values)?;
        let codes: Vec<_> = all.iter().map(|file| file.codes.clone()).collect();
        let found = scan::tokens(&codes, u64::MAX, self.ranks)?;
        let mut contents = blake3::Hasher::new();
        contents.update(found.blake3.as_bytes());
        for document in &documents {
            contents.update(&(document.tokens as u64).to_le_bytes());
        }
        let conversations = Conversations {
            files: all.into(),
            documents,
            content,
            blake3: contents.finalize().to_hex().to_string(),
        };
        self.check(&conversations, setting)?;
        Ok(conversations)
    }

    /// Refuses conversations that the model cannot learn from, and warns of those that are cut.
    fn check(&self, all: &Conversations, setting: SettingName<'_>) -> Result<()> {
        let (context, vocabulary) = (self.context, self.task.outputs() as u64);
        let (mut cut, mut longest, mut straddling) = (0, 0, 0);
        for document in &all.documents {
            let place = || all.files[document.file].place(document);
            let largest = document.largest;
            ensure!(
                largest < vocabulary,
                "{}: expected tokens below {vocabulary}, as the model has, got {largest}; help: give the tokenizer of the \
                 model, or remove the line",
                place()
            );
            ensure!(
                document.first_trained < context,
                "{}: expected a token to train on among the first {context}, the context, got the first at {} of {}: the \
                 rest is cut; help: give a larger {CONTEXT}, or remove the line",
                place(),
                document.first_trained,
                document.tokens
            );
            cut += usize::from(document.tokens > context);
            longest = longest.max(document.tokens);
            straddling += usize::from(document.straddles);
        }
        if straddling > 0 && self.ranks.rank() == 0 {
            tracing::warn!(
                "{setting}: in {straddling} of {} conversations a trained token begins in what opens an answer: whoever asks \
                 the model ends the prompt before it, with another token; help: see show-tokens, and let what the template \
                 writes for add_generation_prompt, or the prompt, end without a space",
                all.documents.len()
            );
        }
        if cut > 0 && self.ranks.rank() == 0 {
            tracing::warn!(
                "{setting}: {cut} of {} conversations are longer than the context of {context} tokens and are cut at the \
                 end; the longest has {longest}",
                all.documents.len()
            );
        }
        Ok(())
    }

    /// Held-out rows come in order, so where batches are as long as their longest row, they are
    /// sorted; the longest first, since memory for these is enough for the others.
    fn sort(&self, documents: &mut [Document]) {
        let is_packed = matches!(self.task, TaskSpec::NextToken { packed: true, .. });
        if self.request.shortens && !is_packed {
            documents.sort_by_key(|one| Reverse(one.tokens.min(self.context)));
        }
    }

    /// Rows of all conversations, or of one side of a split.
    fn of(&self, all: &Conversations, side: Option<(&Split, bool)>) -> ChatRows {
        let (documents, which) = match side {
            None => (all.documents.clone(), "all"),
            Some((split, is_held_out)) => {
                let numbers = (0..split.rows(is_held_out)).map(|row| split.row(is_held_out, row));
                let chosen = numbers.map(|row| all.documents[row as usize]);
                let mut chosen: Vec<Document> = chosen.collect();
                if is_held_out {
                    self.sort(&mut chosen);
                }
                (
                    chosen,
                    if is_held_out {
                        "held out"
                    } else {
                        "trained on"
                    },
                )
            }
        };
        let content = format!("{which}, {}", all.content);
        // Of a tokenizer with more tokens than the model, any will do.
        let padding = self.coder.end.min(self.task.outputs() as u32 - 1);
        let files = all.files.clone();
        ChatRows::new(
            files,
            documents,
            self.context,
            self.task.clone(),
            ([content, all.blake3.clone()], padding),
            self.request.shortens,
        )
    }

    /// The conversations and what of them is trained, for people.
    fn describe(&self, all: &Conversations) -> String {
        let sum = |of: fn(&Document) -> u64| all.documents.iter().map(of).sum::<u64>();
        let (tokens, trained) = (sum(|one| one.tokens as u64), sum(|one| one.trained));
        let whose = match self.coder.loss_on {
            LossOn::Assistant => "what the assistant says",
            LossOn::All => LossOn::All.name(),
        };
        format!(
            "{} conversations of {} tokens, of which {trained} are trained ({whose}), {} tokens a row",
            all.documents.len(),
            tokens,
            self.context
        )
    }
}
