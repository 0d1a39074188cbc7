autocmd BufRead,BufNewFile *.ktr setfiletype ktr
