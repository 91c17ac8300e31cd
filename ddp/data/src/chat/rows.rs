//! Conversations as rows of tokens: one or several in a row, then padding. A row's inputs are
//! tokens with the position at which their document begins; its targets are the next tokens that
//! are trained. Rows of one conversation may be gathered without the end of their padding.

use std::sync::Arc;

use ddp_kernels::{DType, Tensor};

use super::convert::{ChatFile, Document, TRAINED};
use super::pack::best_fit;
use crate::dataset::{Dataset, IGNORED, RowSpec, check_gather, content_blake3, each_row};
use crate::error::Result;
use crate::file_rows::ChangeWatch;
use crate::task::{TaskSpec, TensorSpec};

/// Rows of conversations.
#[derive(Clone, Debug)]
pub(crate) struct ChatRows {
    pub(crate) files: Arc<[ChatFile]>,
    /// Those of all rows, row by row.
    documents: Arc<[Document]>,
    /// The first document of each row, then the number of all.
    firsts: Arc<[usize]>,
    spec: RowSpec,
    /// What identifies the rows besides their sizes.
    content: String,
    /// The BLAKE3 of all tokens.
    blake3: String,
    padding: u32,
    is_packed: bool,
    shortens: bool,
    watch: Arc<ChangeWatch>,
}

impl ChatRows {
    /// Rows of `context` tokens with these documents, of which longer ones are cut at the end.
    pub(crate) fn new(
        files: Arc<[ChatFile]>,
        mut documents: Vec<Document>,
        context: usize,
        task: TaskSpec,
        ([content, blake3], padding): ([String; 2], u32),
        shortens: bool,
    ) -> ChatRows {
        let is_packed = matches!(task, TaskSpec::NextToken { packed: true, .. });
        for document in &mut documents {
            document.tokens = document.tokens.min(context);
        }
        let mut firsts: Vec<usize> = (0..=documents.len()).collect();
        if is_packed {
            let lengths: Vec<usize> = documents.iter().map(|document| document.tokens).collect();
            let rows = best_fit(&lengths, context);
            let ends = rows.iter().scan(0, |end, row| {
                *end += row.len();
                Some(*end)
            });
            firsts = std::iter::once(0).chain(ends).collect();
            documents = rows
                .concat()
                .iter()
                .map(|&number| documents[number as usize])
                .collect();
        }
        let watched = files.iter().map(|file| file.codes.mapped.clone());
        let tokens = || TensorSpec::new(DType::I64, &[context]);
        ChatRows {
            watch: Arc::new(ChangeWatch::over(watched.collect())),
            files,
            documents: documents.into(),
            firsts: firsts.into(),
            spec: RowSpec {
                inputs: tokens(),
                targets: tokens(),
                task,
                image: Vec::new(),
            },
            content,
            blake3,
            padding,
            is_packed,
            shortens: shortens && !is_packed,
        }
    }

    /// The share of all rows that is padding.
    pub(crate) fn padding_share(&self) -> f64 {
        let tokens: usize = self.documents.iter().map(|document| document.tokens).sum();
        1.0 - tokens as f64 / (self.rows() as f64 * self.spec.inputs.elements() as f64)
    }

    /// The documents of a row.
    fn of_row(&self, row: u64) -> &[Document] {
        &self.documents[self.firsts[row as usize]..self.firsts[row as usize + 1]]
    }

    /// Reads a row: `inputs` and `targets` (context, or less if the row is shorter).
    fn read(&self, row: u64, inputs: &mut [i64], targets: &mut [i64]) -> Result<()> {
        targets.fill(IGNORED);
        let mut at = 0;
        for document in self.of_row(row) {
            let (place, codes) = (at..at + document.tokens, &self.files[document.file].codes);
            codes.read_i64(document.first, &mut inputs[place.clone()])?;
            for position in place.clone() {
                let code = inputs[position] as u32;
                let token = i64::from(code & !TRAINED);
                inputs[position] = token | self.start(at);
                if position > at && code & TRAINED != 0 {
                    targets[position - 1] = token;
                }
            }
            at = place.end;
        }
        inputs[at..].fill(i64::from(self.padding) | self.start(at));
        Ok(())
    }

    /// The beginning of a document at this position, as inputs have it.
    fn start(&self, position: usize) -> i64 {
        if self.is_packed {
            (position as i64) << 32
        } else {
            0
        }
    }
}

impl Dataset for ChatRows {
    fn rows(&self) -> u64 {
        self.firsts.len() as u64 - 1
    }

    fn spec(&self) -> &RowSpec {
        &self.spec
    }

    fn used(&self, row: u64) -> usize {
        self.of_row(row).iter().map(|it| it.tokens).sum()
    }

    fn shortens(&self) -> bool {
        self.shortens
    }

    fn fingerprint(&self) -> Result<String> {
        Ok(format!(
            "{} conversations in {} {}rows of {} tokens, {}, {}",
            self.documents.len(),
            self.rows(),
            if self.is_packed { "packed " } else { "" },
            self.spec.inputs.elements(),
            self.spec.task,
            self.content
        ))
    }

    fn blake3(&self) -> Result<String> {
        content_blake3(self, &self.blake3)
    }

    fn check_unchanged(&self) -> Result<()> {
        self.watch.check_all()
    }

    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> Result<()> {
        check_gather(self, rows, inputs, targets);
        self.watch.check()?;
        each_row(rows, inputs, targets, |row, inputs, targets| {
            self.read(row, inputs, targets)
        })
    }
}
