//! Columns of tables that are copied as they are written, for `predict --keep`.

use std::path::{Path, PathBuf};
use std::vec::IntoIter;

use crate::error::{Result, bail};
use crate::features::ColumnPlan;
use crate::files::open_reader;
use crate::files::table::{Columns, TableReader, TableRequest, label_names};

/// Some columns of tables, read row after row.
pub struct KeptColumns {
    /// The names of the columns.
    pub names: Vec<String>,
    /// The tables that follow.
    paths: IntoIter<PathBuf>,
    table: Box<dyn TableReader>,
    /// Where the columns are in the table.
    columns: Vec<usize>,
    /// The row after the current one, over all tables.
    next: u64,
}

impl KeptColumns {
    /// The columns that `asked` names, with commas between, or `all`. Each table must have them.
    pub fn open(paths: Vec<PathBuf>, asked: &str) -> Result<KeptColumns> {
        let first = super::columns(&paths[0])?;
        let names = match asked {
            "all" => first,
            _ => label_names(&first, asked)
                .into_iter()
                .map(String::from)
                .collect(),
        };
        for path in &paths {
            select(path, &names)?;
        }
        let mut paths = paths.into_iter();
        let (table, columns) = select(&paths.next().expect("a file was found"), &names)?;
        let next = 0;
        Ok(KeptColumns {
            names,
            paths,
            table,
            columns,
            next,
        })
    }

    /// Appends the cells of a row, which no call may skip back to, each with a comma after it.
    pub fn row(&mut self, row: u64, into: &mut Vec<u8>) -> Result<()> {
        while self.next <= row {
            if self.table.advance()? {
                self.next += 1;
                continue;
            }
            let Some(path) = self.paths.next() else {
                bail!(
                    "row {row}: expected the rows that were read before, got fewer; help: a file has changed: start again"
                );
            };
            (self.table, self.columns) = select(&path, &self.names)?;
        }
        for &column in &self.columns {
            put_cell(&self.table.value(column).text(), into);
            into.push(b',');
        }
        Ok(())
    }
}

/// The table at `path`, before its first row, and where these columns are in it.
fn select(path: &Path, names: &[String]) -> Result<(Box<dyn TableReader>, Vec<usize>)> {
    let plans: Vec<_> = names.iter().map(|name| ColumnPlan::number(name)).collect();
    let request = TableRequest {
        features: Some(&plans),
        ..TableRequest::default()
    };
    let mut table = open_reader(path)?;
    let columns = Columns::choose(path, &request, table.names())?.all();
    table.select(&columns)?;
    Ok((table, columns))
}

/// Appends a cell of a CSV file, in quotes if it needs them.
pub fn put_cell(text: &[u8], into: &mut Vec<u8>) {
    let is_special = |byte: &u8| b",\"\r\n".contains(byte);
    if !text.iter().any(is_special) && text.trim_ascii() == text {
        return into.extend(text);
    }
    let doubled = text
        .iter()
        .flat_map(|&byte| [byte, byte].into_iter().take(1 + usize::from(byte == b'"')));
    into.push(b'"');
    into.extend(doubled);
    into.push(b'"');
}

#[cfg(test)]
mod tests {
    use std::fs;

    use ddp_kernels::files::testing::Scratch;

    use super::*;

    /// The kept cells of these rows of two tables.
    fn kept(scratch: &Scratch, asked: &str, rows: &[u64]) -> Result<String> {
        let [one, two] = ["one.csv", "two.csv"].map(|name| scratch.path().join(name));
        let first = "id;text;x\r\n1;\"two\r\nlines\";3\r\n2;\"say \"\"a\"\"\";4,5\r\n3;;6";
        fs::write(&one, first).unwrap();
        fs::write(&two, "x,id,text\n7,008,\"a,b\"\n").unwrap();
        let mut kept = KeptColumns::open(vec![one, two], asked)?;
        let mut bytes = kept.names.join("|").into_bytes();
        for &row in rows {
            bytes.push(b'\n');
            kept.row(row, &mut bytes)?;
        }
        Ok(String::from_utf8(bytes).unwrap())
    }

    /// `paste` beside predictions broke rows with line ends in quotes, and those that end in CRLF.
    #[test]
    fn cells_are_kept_as_they_are_and_quoted_where_they_need_it() {
        let scratch = Scratch::new();
        let all =
            "id|text|x\n1,\"two\r\nlines\",3,\n2,\"say \"\"a\"\"\",\"4,5\",\n3,,6,\n008,\"a,b\",7,";
        assert_eq!(kept(&scratch, "all", &[0, 1, 2, 3]).unwrap(), all);
        assert_eq!(
            kept(&scratch, "x, id", &[1, 3]).unwrap(),
            "x|id\n\"4,5\",2,\n7,008,"
        );
        let error = kept(&scratch, "id", &[3, 4]).unwrap_err();
        assert!(error.to_string().contains("a file has changed"), "{error}");
    }

    #[test]
    fn an_unknown_column_is_refused_with_the_nearest_name() {
        let error = kept(&Scratch::new(), "id,tex", &[]).unwrap_err();
        assert_eq!(error.exit_code(), 65);
        let text = error.to_string();
        assert!(text.contains("expected a column \"tex\""), "{text}");
        assert!(text.contains("\"text\" was probably meant"), "{text}");
    }

    /// For a missing `order_day` it suggested `ordered_at`.
    #[test]
    fn a_name_that_only_shares_letters_is_not_suggested() {
        let scratch = Scratch::new();
        let path = scratch.path().join("t.csv");
        fs::write(&path, "ordered_at,sales_2023,town\n1,2,3\n").unwrap();
        for (asked, near) in [
            ("order_day", None),
            ("sales_2024", None),
            ("Town", Some("town")),
            ("twon", Some("town")),
            ("sales 2023", Some("sales_2023")),
        ] {
            let opened = KeptColumns::open(vec![path.clone()], asked);
            let text = opened.err().unwrap().to_string();
            let help = near.map(|near| format!("\"{near}\" was probably meant"));
            let help = help.unwrap_or("name one of these".into());
            assert!(text.contains(&help), "{asked}: {text}");
        }
    }
}
