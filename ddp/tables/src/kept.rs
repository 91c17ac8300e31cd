//! Columns of tables that `predict --keep` copies unchanged.

use std::path::{Path, PathBuf};

use ddp_data::{ColumnPlan, Error, Result};

use crate::columns::{Columns, TableRequest, label_names};
use crate::source::Table;
use crate::table::TableReader;

/// Appends the kept cells of a row as CSV, with a comma after each. Rows come in order; some may be
/// left out.
pub type KeptCells = Box<dyn FnMut(u64, &mut Vec<u8>) -> Result<()>>;

/// The columns that `asked` names, with commas between, or `all`: their names, as a row of them,
/// and their cells in the rows of all these tables.
pub fn keep(paths: Vec<PathBuf>, asked: &str) -> Result<(Vec<u8>, KeptCells)> {
    let mut names = Table::open(&paths[0])?.rows.names().to_vec();
    if asked != "all" {
        let asked = label_names(&names, asked).into_iter();
        names = asked.map(String::from).collect();
    }
    // No table is refused after rows of another were written.
    paths
        .iter()
        .try_for_each(|path| select(path, &names).map(drop))?;
    let mut head = Vec::new();
    names
        .iter()
        .for_each(|name| put_cell(name.as_bytes(), &mut head));
    let (mut paths, mut table, mut next) = (paths.into_iter(), None, 0);
    let cells = move |row: u64, into: &mut Vec<u8>| loop {
        let (reader, columns) = match &mut table {
            Some(table) => table,
            None => {
                let fewer = "expected the rows that were read before, got fewer; help: a file has changed: start again";
                let path = paths.next().ok_or_else(|| Error::Data(fewer.into()))?;
                table.insert(select(&path, &names)?)
            }
        };
        if !reader.advance()? {
            table = None;
            continue;
        }
        next += 1;
        if next > row {
            let cells = columns.iter().map(|&column| reader.value(column).text());
            cells.for_each(|text| put_cell(&text, into));
            return Ok(());
        }
    };
    Ok((head, Box::new(cells)))
}

/// The table at `path`, before its first row, and where these columns are in it.
pub(crate) fn select(path: &Path, names: &[String]) -> Result<(Box<dyn TableReader>, Vec<usize>)> {
    let request = TableRequest {
        features: names.iter().map(|name| ColumnPlan::number(name)).collect(),
        is_kept: true,
        ..TableRequest::default()
    };
    let mut rows = Table::open(path)?.rows;
    let columns = Columns::choose(path, &request, rows.names())?.all();
    rows.select(&columns)?;
    Ok((rows, columns))
}

/// Appends a cell of a CSV file, in quotes if it needs them, and a comma.
fn put_cell(text: &[u8], into: &mut Vec<u8>) {
    let is_special = |byte: &u8| b",\"\r\n".contains(byte);
    if text.iter().any(is_special) || text.trim_ascii() != text {
        let parts = text.split(|byte| *byte == b'"').collect::<Vec<_>>();
        into.extend([b"\"", &*parts.join(&b"\"\""[..]), b"\""].concat());
    } else {
        into.extend(text);
    }
    into.push(b',');
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
        let (mut bytes, mut cells) = keep(vec![one, two], asked)?;
        for &row in rows {
            bytes.push(b'\n');
            cells(row, &mut bytes)?;
        }
        Ok(String::from_utf8(bytes).unwrap())
    }

    /// `paste` beside predictions broke rows with line ends in quotes, and those that end in CRLF.
    #[test]
    fn cells_are_kept_as_they_are_and_quoted_where_they_need_it() {
        let scratch = Scratch::new();
        let all = "id,text,x,\n1,\"two\r\nlines\",3,\n2,\"say \"\"a\"\"\",\"4,5\",\n3,,6,\n008,\"a,b\",7,";
        assert_eq!(kept(&scratch, "all", &[0, 1, 2, 3]).unwrap(), all);
        assert_eq!(
            kept(&scratch, "x, id", &[1, 3]).unwrap(),
            "x,id,\n\"4,5\",2,\n7,008,"
        );
        let error = kept(&scratch, "id", &[3, 4]).unwrap_err();
        assert!(error.to_string().contains("a file has changed"), "{error}");
    }

    #[test]
    fn an_index_without_a_name_is_kept() {
        let scratch = Scratch::new();
        let path = scratch.path().join("t.csv");
        fs::write(&path, ",x,y\n7,1,2\n8,3,4\n").unwrap();
        let (mut bytes, mut cells) = keep(vec![path], "all").unwrap();
        cells(1, &mut bytes).unwrap();
        assert_eq!(String::from_utf8(bytes).unwrap(), ",x,y,8,3,4,");
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
            let opened = keep(vec![path.clone()], asked);
            let text = opened.err().unwrap().to_string();
            let help = near.map(|near| format!("\"{near}\" was probably meant"));
            let help = help.unwrap_or("name one of these".into());
            assert!(text.contains(&help), "{asked}: {text}");
        }
    }
}
